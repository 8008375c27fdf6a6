"""Routers do not see padding: the padding mask goes into the model, which stock scripts never pass.

Seam: a forward pre-hook on each model chunk. A dummy micro-batch gets no mask, because a mask that
is True everywhere makes Megatron divide by zero; its factors are 0 instead (see `aux_loss`).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from megatron_dynbatch.hooks.session import Session, session

_hooked: WeakSet[nn.Module] = WeakSet()


def inject_padding_mask(run: Session, chunk: nn.Module) -> None:
    """Let every training pass of this model chunk know the padding of the current micro-batch."""
    from megatron.core.utils import unwrap_model

    model = unwrap_model(chunk)
    if run.options.num_experts and model not in _hooked:
        model.register_forward_pre_hook(_add_padding_mask, with_kwargs=True)
        _hooked.add(model)


def _add_padding_mask(
    model: Any, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    run = session()
    if run is None or run.current is None or not model.training or run.current.is_dummy:
        return None
    mask = run.current.padding_mask
    if run.layout.sequence_parallel and not model.pre_process:
        # Megatron shards the mask over the sequence on the first stage only.
        mask = router_part(run, mask)
    return positional, {**named, "padding_mask": mask}


def router_part(run: Session, values: Any) -> Any:
    """The part of per-token values [T_local] that this rank's router sees: its sequence shard."""
    if not run.layout.sequence_parallel:
        return values
    from megatron.core import mpu

    size = values.shape[-1] // run.layout.tp
    start = mpu.get_tensor_model_parallel_rank() * size
    return values[..., start : start + size]

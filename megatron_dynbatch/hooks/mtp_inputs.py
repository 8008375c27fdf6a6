"""Labels and mask of multi-token prediction come from the micro-batch, whatever the script passes.

Seam: a forward pre-hook on the model chunk that computes the term. Left to itself Megatron makes
labels out of input ids when a script takes its loss from logits (`labels=None`), and rolls the mask
once too often then; without a mask it trains every token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks.session import Session, session

_hooked: WeakSet[nn.Module] = WeakSet()


def inject_mtp_inputs(run: Session, chunk: nn.Module) -> None:
    """Let every training pass of this model chunk have labels and mask of the micro-batch.

    Raises:
        OptionError: The model cannot be given labels and return logits.
    """
    from megatron.core.utils import unwrap_model

    model = unwrap_model(chunk)
    if not run.options.mtp_num_layers or model in _hooked:
        return
    if not getattr(model, "post_process", True):
        return
    needed = {"labels", "loss_mask", "output_processor"}
    if missing := sorted(needed - inspect.signature(model.forward).parameters.keys()):
        raise OptionError(
            f"--mtp-num-layers with {type(model).__name__}: its forward takes no "
            f"{' and no '.join(missing)}, so the term cannot be given its labels; use GPTModel"
        )
    model.register_forward_pre_hook(_add_inputs, with_kwargs=True)
    _hooked.add(model)


def _add_inputs(
    model: Any, positional: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    run = session()
    if run is None or run.step is None or run.current is None or not model.training:
        return None
    bound = inspect.signature(model.forward).bind_partial(*positional, **named)
    given = bound.arguments
    given["loss_mask"] = run.current.loss_mask
    if given.get("labels") is None:
        given["labels"] = run.current.labels
        if given.get("output_processor") is None:
            given["output_processor"] = logits_of
    return bound.args, bound.kwargs


def logits_of(
    *,
    hidden_states: Tensor,
    output_layer: Callable[..., tuple[Tensor, Any]],
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    scale_logits: Callable[[Tensor], Tensor],
    **unused: Any,
) -> Tensor:
    """What GPTModel returns without labels.

    Args:
        hidden_states: [s, 1, hidden] of the last layer.
        output_layer: The head.
        output_weight: Its weight, where it is shared.
        runtime_gather_output: Whether the vocabulary is gathered.
        scale_logits: Of the model.

    Returns:
        [1, s, vocabulary of this rank].
    """
    logits, _ = output_layer(
        hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output
    )
    return scale_logits(logits).transpose(0, 1).contiguous()

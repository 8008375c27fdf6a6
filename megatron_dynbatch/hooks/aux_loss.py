"""Auxiliary losses (MoE, MTP) weighted by tokens, so that neither packing nor dummies change them.

Megatron weighs the auxiliary term of every micro-batch alike. Here micro-batch k has weight
s = t / T: its non-padding tokens over those of the whole step. The weight is class state that
backward reads, so it is set at the start of *that* micro-batch's backward pass, by a hook on the
stage's output: exact with several micro-batches in flight, with recompute and with deallocated
pipeline outputs. Logged values get the same weights.

The scale that `forward_step_calc_loss` sets for each forward pass is simply overwritten.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_dynbatch.hooks.mtp_inputs import inject_mtp_inputs
from megatron_dynbatch.hooks.padding import inject_padding_mask, router_part
from megatron_dynbatch.hooks.session import Session
from megatron_dynbatch.layout.packed_sequence import PackedSequence
from megatron_dynbatch.steps import Step


@dataclass(frozen=True, slots=True)
class AuxScales:
    """Factors of one micro-batch on this rank; all 0 for a dummy.

    Attributes:
        share: s, its non-padding tokens over the step's.
        moe: What `MoEAuxLossAutoScaler` multiplies by in backward, without the fp16 loss scale.
        mtp: The same for `MTPLossAutoScaler`.
        z_loss: Turns the router's mean over local tokens into this rank's part of the mean over
            the micro-batch's tokens.
        router_tokens: Non-padding tokens that this rank's router sees; what its losses are
            multiplied by with per-token loss.
        moe_log: Factor of a tracked MoE loss, which Megatron divides by M and averages over DP.
        mtp_log: Factor of a tracked MTP loss, which Megatron divides by M and averages over W.
    """

    share: float = 0.0
    moe: float = 0.0
    mtp: float = 0.0
    z_loss: float = 0.0
    router_tokens: int = 0
    moe_log: float = 0.0
    mtp_log: float = 0.0


def begin_schedule(run: Session, model: list[Any]) -> None:
    """Make ready for a step, on every rank, before its first micro-batch.

    Routers are told of padding, and the ranks agree on the step's number of MTP tokens.
    """
    from megatron.core import mpu
    from megatron.core.utils import get_model_config

    chunks = model if isinstance(model, list) else [model]
    run.aux_scales.clear()
    run.samples_of_tokens.clear()
    run.grad_scale_func = get_model_config(chunks[0]).grad_scale_func
    for chunk in chunks:
        inject_padding_mask(run, chunk)
        inject_mtp_inputs(run, chunk)
    if not run.options.mtp_num_layers:
        return

    step = _open(run)
    local = sum(_predicted_tokens(step, step.packed(k)) for k in range(step.num_microbatches))
    total = torch.tensor([local], dtype=torch.int64, device=step.device)
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(total, group=group)
    run.mtp_tokens = int(total.item())


def watch_backward(run: Session, k: int, output: Any) -> None:
    """Put micro-batch ``k`` in force again when the backward pass of ``output`` begins."""
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(functools.partial(_enter_backward, run, k))


def _enter_backward(run: Session, k: int, gradient: torch.Tensor) -> None:
    run.select(k)
    scales = aux_scales(run, k)
    loss_scale = _loss_scale(run, gradient.device)
    if run.options.num_experts:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.main_loss_backward_scale = loss_scale * scales.moe
    if run.options.mtp_num_layers:
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        MTPLossAutoScaler.main_loss_backward_scale = loss_scale * scales.mtp


def _loss_scale(run: Session, device: torch.device) -> torch.Tensor:
    """[1] float64: float32 would round the factors differently for different packings."""
    one = torch.ones(1, device=device)
    scale = run.grad_scale_func
    return (one if scale is None else scale(one)).double()


def aux_scales(run: Session, k: int) -> AuxScales:
    """The factors of micro-batch ``k`` of the open step on this rank; computed once."""
    if k not in run.aux_scales:
        run.aux_scales[k] = _compute_scales(run, k)
    return run.aux_scales[k]


def _compute_scales(run: Session, k: int) -> AuxScales:
    step = _open(run)
    packed = step.packed(k)
    tokens = int(packed.pack.total_lengths.sum())
    if tokens == 0:
        return AuxScales()
    layout = run.layout
    world = layout.dp_cp
    share = tokens / step.num_tokens
    router_ranks = layout.tp * layout.cp
    seen = int(router_values(run, packed, ~packed.padding_mask).sum())
    if not run.options.per_token_loss:
        moe = share * world
    else:  # Megatron multiplies the terms by the router's tokens and by TP·CP
        moe = share / (seen * router_ranks) if seen else 0.0
    mtp = mtp_log = 0.0
    if run.options.mtp_num_layers and run.mtp_tokens:
        predicted = max(_predicted_tokens(step, packed), 1)
        mtp = predicted * world / run.mtp_tokens
        mtp_log = mtp * step.num_microbatches
    return AuxScales(
        share=share,
        moe=moe,
        mtp=mtp,
        z_loss=seen * router_ranks / tokens,
        router_tokens=seen,
        moe_log=share * layout.dp * step.num_microbatches,
        mtp_log=mtp_log,
    )


def router_values(run: Session, packed: PackedSequence, values: NDArray[Any]) -> NDArray[Any]:
    """The part of per-token values [S] of a pack that this rank's routers see."""
    return router_part(run, packed.pack.local(values, _open(run).cp_rank))


def rolled_mask(packed: PackedSequence) -> NDArray[np.float32]:
    """The loss mask of the first MTP depth: shifted left by one inside each sequence, [S]."""
    return packed.pack.following(packed.loss_mask)


def _predicted_tokens(step: Step, packed: PackedSequence) -> int:
    """What the first MTP depth is trained on, on this rank."""
    return int(packed.pack.local(rolled_mask(packed), step.cp_rank).sum())


def _open(run: Session) -> Step:
    assert run.step is not None, "auxiliary losses are weighted only inside a step"
    return run.step

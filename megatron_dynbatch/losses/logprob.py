"""Log-probability and entropy of each token from logits, with the vocabulary split over TP.

With x = logits / temperature, lse = log Σ_v exp x_v over the whole vocabulary, p = exp(x − lse):

    logp = x[target] − lse              ∂logp/∂x_v = [v = target] − p_v
    entropy = lse − Σ_v p_v·x_v         ∂entropy/∂x_v = −p_v·(x_v − lse + entropy)

Rows are handled in chunks and only lse and entropy are kept for the backward pass: no softmax and
no float32 copy of all logits is stored. Tensor parallelism costs one all-gather of 4 numbers a row.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

ROWS_PER_CHUNK = 512

EntropyMode = Literal["none", "metric", "grad"]


def vocab_parallel_logprob_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the target and entropy of the distribution, per token.

    Args:
        logits: [T, V/tp], [T, 1, V/tp] or [1, T, V/tp], this rank's part of the vocabulary.
        targets: T int64 token ids in the whole vocabulary, any shape.
        mask: T values; rows where it is 0 give 0 and no gradient, whatever their logits hold.
        temperature: Logits are divided by it, > 0.
        entropy: "none"; "metric": without gradient; "grad": differentiable.
        tp_group: Tensor-parallel group; None or of size 1: `logits` hold the whole vocabulary.

    Returns:
        logp [T] and entropy [T] (None if not asked for), float32 (float64 for float64 logits).

    Raises:
        ValueError: Shapes that do not fit or a temperature that is not positive.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    num_rows = rows.shape[0]
    if logits.dim() not in (2, 3) or (logits.dim() == 3 and 1 not in logits.shape[:2]):
        raise ValueError(
            f"logits have shape {list(logits.shape)}, expected [T, V], [T, 1, V] or [1, T, V]"
        )
    for name, tensor in (("targets", targets), ("mask", mask)):
        if tensor is not None and tensor.numel() != num_rows:
            raise ValueError(
                f"{name} of shape {list(tensor.shape)} do not match logits of shape "
                f"{list(logits.shape)}: one per row"
            )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    keep = None if mask is None else mask.reshape(-1) != 0
    logp, ent = _LogProbEntropy.apply(
        rows, targets.reshape(-1), keep, 1.0 / temperature, entropy, tp_group
    )
    return logp, None if entropy == "none" else ent


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        keep: Tensor | None,
        scale: float,
        entropy: EntropyMode,
        tp_group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        target = targets - _vocab_start(logits.shape[1], tp_group)
        local = torch.cat(
            [
                _chunk_statistics(x, target[rows], entropy != "none")
                for rows, x in _chunks(logits, scale)
            ]
            or [logits.new_zeros(0, 4, dtype=_compute_dtype(logits))]
        )
        lse, at_target, mean = _combine(local, tp_group)
        logp, ent = at_target - lse, lse - mean
        if keep is not None:
            logp, ent = torch.where(keep, logp, 0.0), torch.where(keep, ent, 0.0)
        ctx.save_for_backward(logits, target, lse, ent, keep)
        ctx.scale = scale
        if entropy != "grad":
            ctx.mark_non_differentiable(ent)
        ctx.entropy_has_gradient = entropy == "grad"
        return logp, ent

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse, ent, keep = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows, x in _chunks(logits, ctx.scale):
            grad_logp = grads[0][rows, None]
            log_p = x - lse[rows, None]
            p = log_p.exp()
            dx = -grad_logp * p
            dx.scatter_add_(1, *_at_target(target[rows], grad_logp, x.shape[1]))
            if ctx.entropy_has_gradient:
                slope = torch.where(p > 0, p * (log_p + ent[rows, None]), 0.0)
                dx -= grads[1][rows, None] * slope
            if keep is not None:
                dx = torch.where(keep[rows, None], dx, 0.0)
            grad[rows] = dx * ctx.scale
        return grad, None, None, None, None, None


def _compute_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor, scale: float) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, logits.shape[0], ROWS_PER_CHUNK):
        rows = slice(start, start + ROWS_PER_CHUNK)
        yield rows, logits[rows].to(_compute_dtype(logits)) * scale


def _vocab_start(part: int, tp_group: dist.ProcessGroup | None) -> int:
    return 0 if tp_group is None else part * dist.get_rank(tp_group)


def _at_target(target: Tensor, value: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """Index and value to scatter at the target; value 0 where another rank holds the target."""
    here = (target >= 0) & (target < part)
    return torch.where(here, target, 0)[:, None], torch.where(here[:, None], value, 0.0)


def _chunk_statistics(x: Tensor, target: Tensor, with_mean: bool) -> Tensor:
    """Of each row of this rank's part: max, Σ exp(x−max), Σ exp(x−max)·x, x[target]. [rows, 4]"""
    largest = x.amax(1)
    # A part of the vocabulary may be forbidden as a whole (−inf): shift it by 0.
    shift = torch.where(largest == -torch.inf, 0.0, largest)
    weight = (x - shift[:, None]).exp()
    total = weight.sum(1)
    mean = torch.where(weight > 0, weight * x, 0.0).sum(1) if with_mean else torch.zeros_like(total)
    here = (target >= 0) & (target < x.shape[1])
    at_target = x.gather(1, torch.where(here, target, 0)[:, None])[:, 0]
    return torch.stack([shift, total, mean, torch.where(here, at_target, 0.0)], 1)


def _combine(local: Tensor, tp_group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """lse, x[target] and Σ p·x of each row over all parts of the vocabulary."""
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    parts = [local]
    if size > 1:
        parts = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(parts, local, group=tp_group)
    shift, total, mean, at_target = torch.stack(parts).unbind(-1)
    largest = shift.amax(0)
    rescale = (shift - largest).exp()
    total = (total * rescale).sum(0)
    return largest + total.log(), at_target.sum(0), (mean * rescale).sum(0) / total

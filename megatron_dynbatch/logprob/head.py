"""Log-probs and entropy straight from hidden states, so that the logits never exist as a whole.

The output layer's product runs for some rows at a time; the backward pass computes it once more,
writes the gradient into it and multiplies that on. Costs one more product of the output layer in
the backward pass and saves [T, V/tp] of logits and as much of gradient.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.logprob.function import (
    EntropyMode,
    VocabularyPart,
    all_parts,
    check_targets,
)
from megatron_dynbatch.logprob.ops import OPS
from megatron_dynbatch.logprob.reference import compute_dtype


def chunked_head_logprob_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    rows_per_chunk: int = 1024,
    reduce_hidden_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`vocab_parallel_logprob_entropy` of logits = hidden · weightᵀ, without making them all.

    Args:
        hidden: [T, H], [T, 1, H] or [1, T, H], the same on every tensor-parallel rank.
        weight: [V/tp, H], this rank's rows of the output layer.
        targets: As there; so are mask, temperature, entropy, tp_group, vocab_size.
        rows: int64, ascending, the rows that may count, so that no others are multiplied. Default:
            those of the mask on a CPU, all on a GPU (which are kept is not known to the host).
        rows_per_chunk: Rows whose logits exist at once.
        reduce_hidden_gradient: Whether the gradient in `hidden` is summed over `tp_group` here.
            False where the operation that made `hidden` does it, as sequence parallelism does.

    Returns:
        logp [T] and entropy [T] (None if not asked for), float32 (float64 for float64).

    Raises:
        ValueError: As there; a weight of another shape or type, rows_per_chunk below 1.
    """
    states = hidden.reshape(-1, hidden.shape[-1])
    if weight.dim() != 2 or weight.shape[1] != states.shape[1] or weight.dtype != hidden.dtype:
        raise ValueError(
            f"output weight {weight.dtype} {list(weight.shape)} does not fit hidden states "
            f"{hidden.dtype} {list(hidden.shape)}: expected [V/tp, {states.shape[1]}]"
        )
    if rows_per_chunk < 1:
        raise ValueError(f"rows_per_chunk must be at least 1, got {rows_per_chunk}")
    shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))
    part = VocabularyPart.of(shape, targets, mask, temperature, tp_group, vocab_size)
    keep = None if mask is None else mask.reshape(-1) != 0
    check_targets(targets.reshape(-1), keep, part)
    if rows is None and keep is not None and keep.device.type == "cpu":
        rows = keep.nonzero()[:, 0]
    logp, ent = _ChunkedHead.apply(
        states, weight, targets.reshape(-1), keep, rows, part, entropy, rows_per_chunk,
        reduce_hidden_gradient,
    )  # fmt: skip
    return logp, None if entropy == "none" else ent


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        keep: Tensor | None,
        rows: Tensor | None,
        part: VocabularyPart,
        entropy: EntropyMode,
        rows_per_chunk: int,
        reduce_hidden_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        target = targets - part.start
        local = hidden.new_zeros((hidden.shape[0], 4), dtype=compute_dtype(hidden))
        for chunk in _chunks(hidden.shape[0], rows, rows_per_chunk):
            local[chunk] = OPS.logprob_statistics(
                hidden[chunk] @ weight.T, target[chunk], None if keep is None else keep[chunk],
                part.columns, part.scale, entropy != "none",
            )  # fmt: skip
        logp, ent, saved = OPS.logprob_combine(all_parts(local, part), keep, part.scale)
        ctx.save_for_backward(hidden, weight, target, keep, rows, saved)
        ctx.part, ctx.rows_per_chunk = part, rows_per_chunk
        ctx.reduce_hidden_gradient = reduce_hidden_gradient and part.size > 1
        ctx.set_materialize_grads(False)
        if entropy != "grad":
            ctx.mark_non_differentiable(ent)
        return logp, ent

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, target, keep, rows, saved = ctx.saved_tensors
        part = ctx.part
        hidden_grad = torch.zeros_like(hidden)
        # One sum over all chunks: in bfloat16 it would lose what the chunks add.
        weight_grad = torch.zeros_like(weight, dtype=compute_dtype(weight))
        for chunk in _chunks(hidden.shape[0], rows, ctx.rows_per_chunk):
            states = hidden[chunk]
            logits = states @ weight.T
            slopes = [None if g is None else g[chunk] for g in grads]
            OPS.logprob_backward_(
                logits, target[chunk], None if keep is None else keep[chunk], saved[chunk],
                *slopes, part.columns, part.scale,
            )  # fmt: skip
            hidden_grad[chunk] = logits @ weight
            if weight.dtype == weight_grad.dtype:
                weight_grad.addmm_(logits.T, states)
            else:
                weight_grad += logits.T @ states
        if ctx.reduce_hidden_gradient:
            dist.all_reduce(hidden_grad, group=part.group)
        return hidden_grad, weight_grad.to(weight.dtype), *[None] * 7


def _chunks(num_rows: int, rows: Tensor | None, size: int) -> Iterator[slice | Tensor]:
    if rows is None:
        for start in range(0, num_rows, size):
            yield slice(start, min(start + size, num_rows))
    elif rows.numel():
        yield from rows.split(size)

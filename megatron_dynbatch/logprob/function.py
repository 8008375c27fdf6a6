"""Log-probability and entropy of each token from logits, differentiable, over a split vocabulary.

Forward reads the logits of the kept rows once and keeps three numbers a row; backward reads and
writes them once, into their own memory if that is allowed. No softmax and no float32 copy of the
logits is made. Tensor parallelism costs one all-gather of four numbers a row. Formulas:
`reference.py`.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.logprob.ops import OPS

EntropyMode = Literal["none", "metric", "grad"]


def vocab_parallel_logprob_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the target and entropy of the distribution, per token.

    Args:
        logits: [T, V/tp], [T, 1, V/tp] or [1, T, V/tp], this rank's part of the vocabulary.
        targets: T int64 token ids in the whole vocabulary, any shape.
        mask: T values; rows where it is 0 give 0 and no gradient, whatever their logits and targets
            hold: they are not read.
        temperature: Logits are divided by it, > 0.
        entropy: "none"; "metric": without gradient; "grad": differentiable.
        tp_group: Tensor-parallel group; None or of size 1: `logits` hold the whole vocabulary.
        vocab_size: Token ids there are; columns from there on are padding, which has probability 0
            and gradient 0. None: all columns count, as in Megatron's cross entropy.
        inplace_backward: Whether the backward pass may write the gradient into the memory of
            `logits`, which must not be used afterwards. A leaf is never written to. An operation
            that saved the logits too makes autograd raise.

    Returns:
        logp [T] and entropy [T] (None if not asked for), float32 (float64 for float64 logits).

    Raises:
        ValueError: Shapes that do not fit, a temperature that is not positive, a vocabulary larger
            than the logits; on the CPU also a target outside the vocabulary in a kept row (on a GPU
            its logp is −inf).
    """
    rows = logits.reshape(-1, logits.shape[-1])
    keep = None if mask is None else mask.reshape(-1) != 0
    part = VocabularyPart.of(logits.shape, targets, mask, temperature, tp_group, vocab_size)
    check_targets(targets.reshape(-1), keep, part)
    may_write = inplace_backward and not logits.is_leaf
    logp, ent = _LogProbEntropy.apply(rows, targets.reshape(-1), keep, part, entropy, may_write)
    return logp, None if entropy == "none" else ent


class VocabularyPart:
    """This rank's part of the vocabulary: where it starts, which of its columns count."""

    def __init__(
        self, width: int, scale: float, group: dist.ProcessGroup | None, vocab_size: int | None
    ) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.start = 0 if group is None else width * dist.get_rank(group)
        self.scale = scale
        whole = width * self.size
        if vocab_size is not None and not 0 < vocab_size <= whole:
            raise ValueError(
                f"vocab_size {vocab_size} does not fit logits of {whole} columns "
                f"({width} on each of {self.size} tensor-parallel ranks)"
            )
        self.vocab_size = whole if vocab_size is None else vocab_size
        self.columns = min(max(self.vocab_size - self.start, 0), width)

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        targets: Tensor,
        mask: Tensor | None,
        temperature: float,
        group: dist.ProcessGroup | None,
        vocab_size: int | None,
    ) -> "VocabularyPart":
        """Of arguments of `vocab_parallel_logprob_entropy`, checked; `shape` is the logits'."""
        if len(shape) not in (2, 3) or (len(shape) == 3 and 1 not in shape[:2]):
            raise ValueError(
                f"logits have shape {list(shape)}, expected [T, V], [T, 1, V] or [1, T, V]"
            )
        num_rows = shape[:-1].numel()
        for name, tensor in (("targets", targets), ("mask", mask)):
            if tensor is not None and tensor.numel() != num_rows:
                raise ValueError(
                    f"{name} of shape {list(tensor.shape)} do not match logits of shape "
                    f"{list(shape)}: one per row"
                )
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        return cls(shape[-1], 1.0 / temperature, group, vocab_size)


def check_targets(targets: Tensor, keep: Tensor | None, part: VocabularyPart) -> None:
    """Raises ValueError for a kept row whose target does not exist; on the CPU alone."""
    if targets.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = (targets < 0) | (targets >= part.vocab_size)
    bad = bad if keep is None else bad & keep
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"target {int(targets[row])} of row {row} is not in the vocabulary of "
            f"{part.vocab_size}; mask the row or correct it"
        )


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        keep: Tensor | None,
        part: VocabularyPart,
        entropy: EntropyMode,
        may_write: bool,
    ) -> tuple[Tensor, Tensor]:
        target = targets - part.start
        local = OPS.logprob_statistics(
            logits, target, keep, part.columns, part.scale, entropy != "none"
        )
        logp, ent, saved = OPS.logprob_combine(all_parts(local, part), keep, part.scale)
        ctx.save_for_backward(logits, target, keep, saved)
        ctx.columns, ctx.scale, ctx.may_write = part.columns, part.scale, may_write
        ctx.set_materialize_grads(False)
        if entropy != "grad":
            ctx.mark_non_differentiable(ent)
        return logp, ent

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, target, keep, saved = ctx.saved_tensors
        rest = (target, keep, saved, *grads, ctx.columns, ctx.scale)
        if not ctx.may_write:
            return OPS.logprob_backward(logits, *rest), *[None] * 5
        OPS.logprob_backward_(logits, *rest)
        # Whoever saved the logits too, or runs this graph again, is told by autograd.
        torch.autograd.graph.increment_version(logits)
        return logits.detach(), *[None] * 5


def all_parts(local: Tensor, part: VocabularyPart) -> Tensor:
    """Statistics of all parts of the vocabulary, [tp, T, 4]: the one collective."""
    if part.size == 1 or local.shape[0] == 0:
        return local[None]
    parts = local.new_empty((part.size, *local.shape))
    dist.all_gather_into_tensor(parts.flatten(0, 1), local, group=part.group)
    return parts

"""Token weights from response masks and denominators, and sums per sample.

The definition of both ops in torch, and their CPU path. Invariants (asserted by the tests): one
micro-batch costs a fixed number of launches whatever its number of samples and values; the
per-sample sums add up to the total; masked positions are selected away.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_dynbatch.reduce.segment_table import SegmentTable
from megatron_dynbatch.reduce.weighted_sum import check_weights


def token_weights(masks: Tensor, denoms: Tensor, table: SegmentTable) -> Tensor:
    """Weights w = m / d at the positions of this rank's tensor.

    Args:
        masks: [Σ R] response masks of all samples one after the other, 0/1 or fractional (or the
            local parts, if the table was built with `masks_are_local`).
        denoms: [B] denominator of each sample; one that is not positive is allowed only where the
            sample's mask is empty.
        table: Where each response lies.

    Returns:
        float64 [T] on the device of `masks`; 0 outside responses and at masked tokens.

    Raises:
        ValueError: Lengths that do not match, or (on CPU) a denominator ≤ 0 with a mask not empty.
    """
    if masks.dim() != 1 or masks.shape[0] != table.num_mask_entries:
        raise ValueError(
            f"masks have shape {list(masks.shape)}, the samples have {table.num_mask_entries} "
            "response tokens"
        )
    if denoms.dim() != 1 or denoms.shape[0] != table.num_samples:
        raise ValueError(
            f"{denoms.numel()} denominators were given for {table.num_samples} samples"
        )
    device = masks.device
    if table.num_samples == 0 or table.num_mask_entries == 0:
        return torch.zeros(table.num_tokens, dtype=torch.float64, device=device)
    sources = torch.from_numpy(table.sources).to(device, non_blocking=True)
    samples = torch.from_numpy(table.samples).to(device, non_blocking=True)
    mask = torch.where(sources >= 0, masks[sources.clamp(min=0)], 0).to(torch.float64)
    denom = denoms.to(device=device, dtype=torch.float64)[samples.clamp(max=table.num_samples - 1)]
    # Only on the host can the check look at values without making the device wait.
    if device.type == "cpu" and bool(((mask != 0) & (denom <= 0)).any()):
        bad = int(samples[(mask != 0) & (denom <= 0)][0])
        raise ValueError(
            f"sample {bad} has trained tokens but its denominator is {denoms[bad].item():g}; "
            "a denominator is positive wherever a mask is not empty"
        )
    return torch.where(mask != 0, mask / denom, 0.0)


class _SegmentSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, samples: Tensor, num_samples: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(w, samples)
        ctx.dtype = x.dtype
        terms = torch.where(w != 0, x, 0.0).to(torch.float64) * w
        sums = terms.new_zeros(x.shape[0], num_samples + 1).index_add_(1, samples, terms)
        per_sample = sums[:, :num_samples]
        return per_sample.sum(1), per_sample

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        w, samples = ctx.saved_tensors
        total, per_sample = grads
        by_sample = torch.nn.functional.pad(total[:, None] + per_sample, (0, 1))
        return (by_sample[:, samples] * w).to(ctx.dtype), None, None, None


def segment_sums(x: Tensor, w: Tensor, table: SegmentTable) -> tuple[Tensor, Tensor]:
    """Sums K values over each sample and over all: Σ_t w[t]·x[k, t].

    Args:
        x: [K, T] per-token values in the rank's layout.
        w: [T] float64 token weights (see `token_weights`).
        table: Where each sample lies; its number of tokens is T.

    Returns:
        total float64 [K] and per-sample sums float64 [K, B], of this rank's tokens only; both
        differentiable in x.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit, naming them.
    """
    check_weights(x, w)
    if x.shape[1] != table.num_tokens:
        raise ValueError(
            f"values of shape {list(x.shape)} were given for a table of {table.num_tokens} tokens"
        )
    samples = torch.from_numpy(table.samples).to(x.device, non_blocking=True)
    return _SegmentSums.apply(x, w, samples, table.num_samples)

"""Token weights from response masks and denominators, and sums per sample.

Invariants (asserted by the tests): one micro-batch costs a fixed number of launches whatever its
number of samples and values; per-sample sums are bitwise the same for every packing; masked
positions are selected away.
"""

import torch
from torch import Tensor

from megatron_dynbatch.reduce.checks import Accumulate, check_accumulate, check_values
from megatron_dynbatch.reduce.ops import OPS, SegmentSumsOnHost, eager_on_host
from megatron_dynbatch.reduce.segment_table import SegmentTable


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
    denoms = denoms.to(device=device, dtype=torch.float64, non_blocking=True)
    index = table.on(device)
    # Only on the host can the check look at values without making the device wait.
    if device.type == "cpu":
        _check_denominators(masks, denoms, table)
    return OPS.token_weights.default(
        masks.contiguous(), denoms, index.pieces, index.sources, index.samples, table.num_tokens
    )


def _check_denominators(masks: Tensor, denoms: Tensor, table: SegmentTable) -> None:
    index = table.on(masks.device)
    assert index.sources is not None and index.samples is not None
    present = index.samples < table.num_samples
    trained = index.samples[present][masks[index.sources[present]] != 0]
    wrong = trained[denoms[trained] <= 0]
    if wrong.numel():
        sample = int(wrong[0])
        raise ValueError(
            f"sample {sample} has trained tokens but its denominator is {denoms[sample].item():g}; "
            "a denominator is positive wherever a mask is not empty"
        )


def segment_sums(
    x: Tensor, w: Tensor, table: SegmentTable, *, accumulate: Accumulate = "float64"
) -> tuple[Tensor, Tensor]:
    """Sums K values over each sample and over all: Σ_t w[t]·x[k, t].

    Args:
        x: contiguous [K, T] per-token values in the rank's layout.
        w: [T] float64 token weights (see `token_weights`), 0 outside the responses of the table.
        table: Where each sample lies; its number of tokens is T.
        accumulate: As in `weighted_sums`.

    Returns:
        total float64 [K] and per-sample sums float64 [K, B], of this rank's tokens only; both
        differentiable in x. With "exact": int64 limbs [K, 3] and [K, B, 3].

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit, naming them.
    """
    check_values(x, w)
    check_accumulate(accumulate)
    if x.shape[1] != table.num_tokens:
        raise ValueError(
            f"values of shape {list(x.shape)} were given for a table of {table.num_tokens} tokens"
        )
    if x.dtype == torch.float16:
        x = x.float()  # exact, and the kernels have no float16
    if accumulate == "float64" and eager_on_host(x):
        return SegmentSumsOnHost.apply(x, w, table.stretches, table.num_samples)
    index = table.on(x.device)
    if accumulate == "exact":
        op, x = OPS.exact_segment_sums.default, x.detach()
    else:
        op = OPS.segment_sums.default
    return op(x, w, index.pieces, index.samples, table.num_samples)

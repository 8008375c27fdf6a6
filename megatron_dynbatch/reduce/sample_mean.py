"""`get_sum_of_sample_mean`: the reducer of a micro-batch under the name RL trainers know."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_dynbatch.geometry import ParallelLayout, padded_length
from megatron_dynbatch.geometry.ragged import Int64
from megatron_dynbatch.reduce.segment_sums import token_weights
from megatron_dynbatch.reduce.segment_table import SegmentTable, segment_table
from megatron_dynbatch.reduce.weighted_sum import weighted_sum


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    sample_denoms: Sequence[float] | Tensor | None = None,
    calculate_per_token_loss: bool = False,
    qkv_format: Literal["thd", "bshd"] = "thd",
    max_seq_lens: Sequence[int] | None = None,
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Callable[[Tensor], Tensor]:
    """Makes the function that sums a per-token value over this rank's part of a micro-batch.

    The sum is Σ_i (1/d[i])·Σ_t m[i,t]·x[i,t] over local tokens; added over context-parallel ranks
    and micro-batches it is the numerator of the step's mean. The result is differentiable, float64
    and 0-d; one fused call, no loop.

    Args:
        total_lengths: [B] tokens of each sample.
        response_lengths: [B] response tokens of each sample.
        loss_masks: B tensors [R_i], 0/1; or, with `sample_denoms`, only this rank's entries.
        sample_denoms: [B] denominators d; default: each sample's own mask sum.
        calculate_per_token_loss: d = 1, a plain masked sum.
        qkv_format: "thd": every sequence is chunked by its own length; "bshd": by its entry of
            `max_seq_lens`, the width of the batch.
        max_seq_lens: [B] laid-out widths, needed for "bshd".
        cp_size: context-parallel size C.
        cp_rank: rank in 0 … C−1.

    Returns:
        f(x) → 0-d float64, for x either this rank's response values, sample after sample, or this
        rank's whole pack ([T_local], a leading or trailing dimension of 1 allowed).

    Raises:
        ValueError: Lists of different lengths (naming the counts), a mask of another length than
            its response, "bshd" without widths; from f: an x of another length.
    """
    counts = {
        "total lengths": len(total_lengths),
        "response lengths": len(response_lengths),
        "loss masks": len(loss_masks),
        "sample denominators": len(loss_masks) if sample_denoms is None else len(sample_denoms),
    }
    if len(set(counts.values())) > 1:
        got = ", ".join(f"{n} {name}" for name, n in counts.items())
        raise ValueError(f"every list needs one entry per sample, got {got}")
    padded = _laid_out_lengths(total_lengths, qkv_format, max_seq_lens, cp_size)
    masks = torch.cat(list(loss_masks)) if len(loss_masks) else torch.zeros(0)
    mask_lengths = np.asarray([len(mask) for mask in loss_masks], dtype=np.int64)

    def table(layout: Literal["pack", "response"], local: bool = False) -> SegmentTable:
        return segment_table(
            total_lengths,
            response_lengths,
            padded_lengths=padded,
            cp_size=cp_size,
            cp_rank=cp_rank,
            layout=layout,
            masks_are_local=local,
        )

    local = _masks_are_local(mask_lengths, np.asarray(response_lengths), table("response"))
    if calculate_per_token_loss:
        denoms = torch.ones(len(loss_masks), dtype=torch.float64)
    elif sample_denoms is not None:
        denoms = torch.as_tensor(sample_denoms, dtype=torch.float64)
    elif local and cp_size > 1:
        raise ValueError("chunked loss masks have no sums of whole samples; give sample_denoms")
    else:
        owner = torch.from_numpy(np.repeat(np.arange(len(loss_masks)), mask_lengths))
        denoms = torch.zeros(len(loss_masks), dtype=torch.float64, device=masks.device)
        denoms.index_add_(0, owner.to(masks.device), masks.to(torch.float64))

    weights: dict[int, Tensor] = {}
    layouts: tuple[Literal["pack", "response"], ...] = ("pack", "response")
    for layout in layouts:  # without prompts both are equally long: response order wins
        placed = table(layout, local)
        weights[placed.num_tokens] = token_weights(masks, denoms, placed)

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        if x.numel() not in weights or x.numel() != max(x.shape, default=0):
            lengths = " or ".join(str(n) for n in weights)
            raise ValueError(
                f"values of shape {list(x.shape)} do not fit: this rank has {lengths} entries"
                " (response tokens, or the whole pack)"
            )
        return weighted_sum(x.reshape(-1), weights[x.numel()].to(x.device, non_blocking=True))

    return sum_of_sample_mean


def _laid_out_lengths(
    total_lengths: Sequence[int],
    qkv_format: str,
    max_seq_lens: Sequence[int] | None,
    cp_size: int,
) -> Int64 | None:
    if qkv_format == "thd":
        return None
    if qkv_format != "bshd":
        raise ValueError(f"qkv_format is 'thd' or 'bshd', got {qkv_format!r}")
    if max_seq_lens is None or len(max_seq_lens) != len(total_lengths):
        got = "none" if max_seq_lens is None else str(len(max_seq_lens))
        raise ValueError(f"'bshd' needs {len(total_lengths)} max_seq_lens, got {got}")
    return padded_length(np.asarray(max_seq_lens, dtype=np.int64), ParallelLayout(cp=cp_size))


def _masks_are_local(lengths: Int64, response: Int64, table: SegmentTable) -> bool:
    """Whether masks hold one entry per local response token; the error if neither fits."""
    if np.array_equal(lengths, response):
        return False
    if np.array_equal(lengths, table.local_lengths):
        return True
    i = int(np.flatnonzero(lengths != response)[0])
    raise ValueError(
        f"the loss mask of sample {i} has {lengths[i]} entries, its response has {response[i]} "
        f"tokens ({table.local_lengths[i]} of them on this rank)"
    )

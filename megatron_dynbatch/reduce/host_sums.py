"""Sums per sample on the host, as `reference` defines them, by the stretches of the pack.

NumPy adds up and repeats whole stretches several times faster than torch scatters and gathers
position by position; with these the sums of B samples cost little more than their total.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dynbatch.reduce.ragged import Int64
from megatron_dynbatch.reduce.reference import all_finite, selected


@dataclass(frozen=True)
class Stretches:
    """The T positions cut into gap, piece, gap, … piece, gap.

    Attributes:
        lengths: int64 [2·B·P + 1] length of each, gaps first; they add up to T.
        bounds: where each piece that is not empty starts and ends, without an end at T.
        held: the pieces that are not empty.
    """

    lengths: Int64
    bounds: Int64
    held: Int64

    @classmethod
    def of(cls, pieces: NDArray[np.int32], num_tokens: int) -> "Stretches":
        """From the rows of a segment table and T."""
        offsets, _, lengths, _ = pieces
        starts_and_ends = np.stack([offsets, offsets + lengths], 1).ravel()
        held = np.flatnonzero(lengths)
        bounds = starts_and_ends.reshape(-1, 2)[held].ravel()
        if held.size and bounds[-1] == num_tokens:
            bounds = bounds[:-1]
        return cls(np.diff(starts_and_ends, prepend=0, append=num_tokens), bounds, held)


def segment_sums(
    x: Tensor, w: Tensor, stretches: Stretches, num_samples: int
) -> tuple[Tensor, Tensor]:
    """See `reference.segment_sums`."""
    total, per_sample = _sums(x.to(torch.float64, copy=True).mul_(w), stretches, num_samples)
    if all_finite(total):
        return total, per_sample
    return _sums(selected(x, w).to(torch.float64).mul_(w), stretches, num_samples)


def _sums(terms: Tensor, stretches: Stretches, num_samples: int) -> tuple[Tensor, Tensor]:
    num_values, num_pieces = terms.shape[0], stretches.lengths.size // 2
    sums = np.zeros((num_values, 0))
    if stretches.held.size:
        # Every other sum is a gap's: what a piece adds up to depends on that piece alone.
        parts = np.add.reduceat(terms.numpy(), stretches.bounds, axis=1)
        sums = np.ascontiguousarray(parts[:, ::2])
    if stretches.held.size != num_pieces:
        held, sums = sums, np.zeros((num_values, num_pieces))
        sums[:, stretches.held] = held
    if num_pieces != num_samples:
        sums = sums.reshape(num_values, num_samples, -1).sum(2)
    per_sample = torch.from_numpy(sums)
    return per_sample.sum(1), per_sample


def segment_sums_backward(
    grad_total: Tensor | None,
    grad_samples: Tensor | None,
    w: Tensor,
    stretches: Stretches,
    dtype: torch.dtype,
) -> Tensor:
    """See `reference.segment_sums_backward`; a gradient that is None is 0, not both are."""
    by_sample = 0.0 if grad_samples is None else grad_samples.numpy()
    if grad_total is not None:
        by_sample = by_sample + grad_total.numpy()[:, None]
    num_values, num_samples = np.shape(by_sample)
    values = np.zeros((num_values, stretches.lengths.size))
    per_sample = stretches.lengths.size // 2 // max(num_samples, 1)
    values[:, 1::2] = by_sample if per_sample == 1 else np.repeat(by_sample, per_sample, axis=1)
    dx = torch.from_numpy(values.repeat(stretches.lengths, axis=1)).mul_(w)
    if not math.isfinite(values.sum()):
        dx = selected(dx, w)
    return dx.to(dtype)

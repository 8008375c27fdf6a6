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

from megatron_dynbatch.geometry.ragged import Int64
from megatron_dynbatch.reduce.reference import all_finite, selected


@dataclass(frozen=True)
class Stretches:
    """The T positions cut into S stretches: pieces of samples, and gaps between them.

    Attributes:
        lengths: int64 [S] length of each, none 0; they add up to T.
        starts: int64 [S] first position of each.
        pieces: Which stretches are pieces; None: all.
        held: Which of the B·P pieces those are, the others being empty; None: all.
        num_pieces: B·P.
    """

    lengths: Int64
    starts: Int64
    pieces: Int64 | None
    held: Int64 | None
    num_pieces: int

    @classmethod
    def of(cls, pieces: NDArray[np.int32], num_tokens: int) -> "Stretches":
        """From the rows of a segment table and T."""
        offsets, _, lengths, _ = pieces
        edges = np.stack([offsets, offsets + lengths], 1).ravel()
        # Gap, piece, gap, … piece, gap.
        alternating = np.diff(edges, prepend=0, append=num_tokens)
        there = np.flatnonzero(alternating)
        is_piece = there % 2 == 1
        held = there[is_piece] // 2
        return cls(
            lengths=alternating[there],
            starts=np.cumsum(alternating[there]) - alternating[there],
            pieces=None if is_piece.all() else np.flatnonzero(is_piece),
            held=None if held.size == lengths.size else held,
            num_pieces=lengths.size,
        )


def segment_sums(
    x: Tensor, w: Tensor, stretches: Stretches, num_samples: int
) -> tuple[Tensor, Tensor]:
    """See `reference.segment_sums`."""
    total, per_sample = _sums(x.to(torch.float64, copy=True).mul_(w), stretches, num_samples)
    if all_finite(total):
        return total, per_sample
    return _sums(selected(x, w).to(torch.float64).mul_(w), stretches, num_samples)


def _sums(terms: Tensor, stretches: Stretches, num_samples: int) -> tuple[Tensor, Tensor]:
    num_values = terms.shape[0]
    sums = np.zeros((num_values, 0))
    if stretches.starts.size:
        # What a piece adds up to depends on that piece alone.
        sums = np.add.reduceat(terms.numpy(), stretches.starts, axis=1)
    if stretches.pieces is not None:
        sums = sums.take(stretches.pieces, axis=1)
    if stretches.held is not None:
        held, sums = sums, np.zeros((num_values, stretches.num_pieces))
        sums[:, stretches.held] = held
    if stretches.num_pieces != num_samples:
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
    if grad_samples is None:
        assert grad_total is not None
        values = grad_total.numpy()[:, None]
    else:
        values = grad_samples.numpy()
        if grad_total is not None:
            values = values + grad_total.numpy()[:, None]
    num_values, num_samples = values.shape
    if num_samples != stretches.num_pieces:
        values = np.repeat(values, stretches.num_pieces // max(num_samples, 1), axis=1)
    if stretches.held is not None:
        values = values.take(stretches.held, axis=1)
    if stretches.pieces is not None:
        held, values = values, np.zeros((num_values, stretches.lengths.size))
        values[:, stretches.pieces] = held
    dx = torch.from_numpy(values.repeat(stretches.lengths, axis=1)).mul_(w)
    if not math.isfinite(values.sum()):
        dx = selected(dx, w)
    return dx.to(dtype)

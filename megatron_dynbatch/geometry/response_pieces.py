"""Where each sample's response lies in a rank's tensor: the one map between the two layouts.

A response of R tokens in a sequence of T is predicted at positions T−R−1 … T−2. Context
parallelism cuts a sequence in chunks, so a rank holds one piece of a response per chunk it owns:
two with Megatron's zigzag, one when chunks are contiguous. Both cases, and no context parallelism,
are the same table of (offset in the rank's tensor, offset in the response, length).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from megatron_dynbatch.geometry.padding import padded_length
from megatron_dynbatch.geometry.parallel_layout import ParallelLayout
from megatron_dynbatch.geometry.ragged import Int64, ragged_arange, starts_of
from megatron_dynbatch.geometry.zigzag import num_chunks, owned_chunks

Layout = Literal["pack", "response"]


@dataclass(frozen=True, eq=False)
class ResponsePieces:
    """Pieces of B samples on one context-parallel rank, in the order of the rank's tensor.

    Attributes:
        x_offsets: int64 [B, P] first position of each piece in the rank's tensor.
        mask_offsets: int64 [B, P] the piece's first entry in the concatenated responses.
        lengths: int64 [B, P] tokens of each piece, 0 where the rank holds none of it.
        num_tokens: length of the rank's tensor.
        num_mask_entries: length of the concatenated responses (masks, log-probs …).
    """

    x_offsets: Int64
    mask_offsets: Int64
    lengths: Int64
    num_tokens: int
    num_mask_entries: int

    @property
    def num_samples(self) -> int:
        """Number of samples B."""
        return self.lengths.shape[0]

    @cached_property
    def local_lengths(self) -> Int64:
        """Response tokens of each sample on this rank, int64 [B]."""
        return self.lengths.sum(1)

    @cached_property
    def positions(self) -> Int64:
        """Positions of all local response tokens in the rank's tensor, int64 [Σ lengths]."""
        return ragged_arange(self.x_offsets.ravel(), self.lengths.ravel())

    @cached_property
    def sources(self) -> Int64:
        """Entry of the concatenated responses at each position, int64 [T].

        Where there is none: `num_mask_entries`.
        """
        sources = np.full(self.num_tokens, self.num_mask_entries, dtype=np.int64)
        sources[self.positions] = ragged_arange(self.mask_offsets.ravel(), self.lengths.ravel())
        return sources

    @cached_property
    def samples(self) -> Int64:
        """Sample whose response holds each position; B where none does. int64 [T]."""
        samples = np.full(self.num_tokens, self.num_samples, dtype=np.int64)
        samples[self.positions] = np.repeat(np.arange(self.num_samples), self.local_lengths)
        return samples


def response_pieces(
    total_lengths: Sequence[int] | Int64,
    response_lengths: Sequence[int] | Int64,
    *,
    padded_lengths: Sequence[int] | Int64 | None = None,
    num_tokens: int | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    layout: Layout = "pack",
    zigzag: bool = True,
    masks_are_local: bool = False,
) -> ResponsePieces:
    """Builds the table of one micro-batch on one rank, on the host.

    Args:
        total_lengths: [B] tokens of each sample, T.
        response_lengths: [B] response tokens of each sample, R ≤ T.
        padded_lengths: [B] lengths as laid out; default: the next multiple of the chunk count.
        num_tokens: length of the rank's tensor; default: that of the samples alone.
        cp_size: context-parallel size C.
        cp_rank: rank in 0 … C−1.
        layout: "pack": the rank's tensor holds every token of its chunks; "response": only the
            response tokens of its chunks, sample after sample.
        zigzag: Chunks r and 2·C−1−r belong to rank r (Megatron); else contiguous: chunk r of C.
        masks_are_local: The masks hold this rank's response tokens only, already chunked.

    Raises:
        ValueError: Lists of different lengths, or lengths that do not fit, naming the sample.
    """
    total = np.asarray(total_lengths, dtype=np.int64)
    response = np.asarray(response_lengths, dtype=np.int64)
    unit = num_chunks(cp_size, zigzag)
    if padded_lengths is None:
        padded = -(-total // unit) * unit
    else:
        padded = np.asarray(padded_lengths, dtype=np.int64)
    _check(total, response, padded, unit)

    starts, chunk = owned_chunks(padded, cp_size, cp_rank, zigzag)
    prompt = (total - response)[:, None]
    # The first token of a sequence has no predictor: its entry lies before position 0.
    first = np.maximum(starts, np.maximum(prompt - 1, 0))
    if layout == "response" and cp_size == 1:
        first = np.maximum(starts - 1, prompt - 1)  # the tensor holds all R entries
    lengths = np.maximum(np.minimum(starts + chunk[:, None], total[:, None] - 1) - first, 0)
    if layout == "pack":
        piece = np.arange(starts.shape[1]) * chunk[:, None]
        # An empty piece gets an offset too, so that offsets ascend and can be searched.
        within = np.minimum(first - starts, chunk[:, None])
        offsets = starts_of(chunk * starts.shape[1])[:, None] + piece + within
        held = int(chunk.sum()) * starts.shape[1]
    else:
        offsets = starts_of(lengths.ravel()).reshape(lengths.shape)
        held = int(lengths.sum())
    if masks_are_local:
        mask_offsets = starts_of(lengths.ravel()).reshape(lengths.shape)
    else:
        mask_offsets = starts_of(response)[:, None] + first - (prompt - 1)
    return ResponsePieces(
        x_offsets=offsets,
        mask_offsets=np.where(lengths > 0, mask_offsets, 0),
        lengths=lengths,
        num_tokens=held if num_tokens is None else num_tokens,
        num_mask_entries=int(lengths.sum() if masks_are_local else response.sum()),
    )


def most_response_rows(
    total_lengths: Int64, response_lengths: Int64, layout: ParallelLayout
) -> Int64:
    """Rows of logits that each sample's response has on the CP rank with most of them, int64 [B].

    Args:
        total_lengths: [B] tokens of each sample.
        response_lengths: [B] response tokens of each sample.
        layout: Decides padding and context parallelism.
    """
    padded = padded_length(total_lengths, layout)
    pieces = (
        response_pieces(
            total_lengths, response_lengths, padded_lengths=padded, cp_size=layout.cp, cp_rank=rank
        )
        for rank in range(layout.cp)
    )
    return np.stack([of_rank.local_lengths for of_rank in pieces]).max(0)


def _check(total: Int64, response: Int64, padded: Int64, unit: int) -> None:
    if not total.shape == response.shape == padded.shape or total.ndim != 1:
        raise ValueError(
            f"{total.size} total lengths, {response.size} response lengths and {padded.size} "
            "padded lengths were given; each sample needs one of each"
        )
    for bad, what in (
        ((response < 0) | (response > total), "has more response tokens than tokens"),
        (padded < total, "is longer than its padded length"),
        (padded % unit != 0, f"has a padded length that {unit} does not divide"),
    ):
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise ValueError(
                f"sample {i} {what}: total {total[i]}, response {response[i]}, padded {padded[i]}"
            )

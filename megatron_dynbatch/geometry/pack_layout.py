"""`PackLayout`: where every token of a pack lies, in the pack and on its context-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry.padding import padded_length, tail_lengths
from megatron_dynbatch.geometry.parallel_layout import ParallelLayout
from megatron_dynbatch.geometry.ragged import Int64, starts_of
from megatron_dynbatch.geometry.response_pieces import ResponsePieces, response_pieces
from megatron_dynbatch.geometry.spans import Spans
from megatron_dynbatch.geometry.zigzag import zigzag_indices


@dataclass(frozen=True, eq=False)
class PackLayout:
    """B samples as one THD sequence of S rows, over C context-parallel ranks.

    Invariants (asserted by the tests): samples stand in the order in which they are given, each
    padded to `padded_length`; the tail is made of sequences of its own (`tail_lengths`); every
    sequence is a multiple of what context parallelism needs.

    Attributes:
        total_lengths: int64 [B], tokens T of each sample.
        response_lengths: int64 [B], response tokens R of each sample.
        tokens: The rows of each sample's tokens.
        responses: The rows that predict each sample's response: those of tokens T−R−1 … T−2. The
            first token of a sample without a prompt is predicted nowhere (`num_unpredicted`).
        cu_seqlens: int32 [n+1], cumulative lengths without padding (a tail sequence has length 0).
        cu_seqlens_padded: int32 [n+1], cumulative lengths as laid out; the last is S.
        cp_size: C.
    """

    total_lengths: Int64
    response_lengths: Int64
    tokens: Spans
    responses: Spans
    cu_seqlens: NDArray[np.int32]
    cu_seqlens_padded: NDArray[np.int32]
    cp_size: int

    @classmethod
    def of_samples(
        cls,
        total_lengths: Int64,
        response_lengths: Int64,
        layout: ParallelLayout,
        width: int | None = None,
    ) -> PackLayout:
        """Samples one after the other; without samples, a dummy of padding.

        Args:
            total_lengths: [B] tokens of each sample.
            response_lengths: [B] response tokens of each sample.
            layout: Decides padding and C.
            width: S; default: the smallest that the layout allows.

        Raises:
            ValueError: See `tail_lengths`.
        """
        padded = padded_length(total_lengths, layout)
        tail = tail_lengths(int(padded.sum()), width, layout)
        cu_seqlens_padded = _cumulative(np.concatenate([padded, tail]))
        starts, size = starts_of(padded), int(cu_seqlens_padded[-1])
        first = np.maximum(total_lengths - response_lengths - 1, 0)
        last = np.maximum(total_lengths - 1, 0)
        return cls(
            total_lengths=total_lengths,
            response_lengths=response_lengths,
            tokens=Spans(starts, total_lengths, size),
            responses=Spans(starts + first, np.minimum(response_lengths, last - first), size),
            cu_seqlens=_cumulative(np.concatenate([total_lengths, np.zeros_like(tail)])),
            cu_seqlens_padded=cu_seqlens_padded,
            cp_size=layout.cp,
        )

    @property
    def num_rows(self) -> int:
        """S."""
        return self.tokens.num_rows

    @property
    def max_seqlen(self) -> int:
        """Rows of the longest sequence as laid out."""
        return int(np.diff(self.cu_seqlens_padded).max())

    @property
    def num_unpredicted(self) -> Int64:
        """How many first response tokens of each sample nothing predicts: 0 or 1, int64 [B]."""
        return self.response_lengths - self.responses.lengths

    @cached_property
    def position_ids(self) -> Int64:
        """Position of each row in its sequence, int64 [S]."""
        starts = self.cu_seqlens_padded[:-1].astype(np.int64)
        return np.arange(self.num_rows) - np.repeat(starts, np.diff(self.cu_seqlens_padded))

    @cached_property
    def sample_of_row(self) -> Int64:
        """Place of the sample whose sequence holds each row, B and more in the tail; int64 [S]."""
        lengths = np.diff(self.cu_seqlens_padded)
        return np.repeat(np.arange(len(lengths)), lengths)

    @cached_property
    def _local_rows(self) -> dict[int, Int64]:
        """Context-parallel rank → its rows, as far as they were asked for."""
        return {}

    def following(self, values: NDArray) -> NDArray:
        """The value of the next row of the same sequence, 0 at its end; [S]."""
        result = np.empty_like(values)
        result[:-1] = values[1:]
        result[self.cu_seqlens_padded[1:] - 1] = 0
        return result

    def local(self, values: NDArray, cp_rank: int) -> NDArray:
        """The rows [S, …] that a context-parallel rank holds, in its order [S / C, …]."""
        if self.cp_size == 1:
            return values
        if cp_rank not in self._local_rows:
            self._local_rows[cp_rank] = zigzag_indices(
                self.cu_seqlens_padded, self.cp_size, cp_rank
            )
        return values[self._local_rows[cp_rank]]

    def response_pieces(self, cp_rank: int) -> ResponsePieces:
        """Where each sample's response lies on a context-parallel rank."""
        return response_pieces(
            self.total_lengths,
            self.response_lengths,
            padded_lengths=np.diff(self.cu_seqlens_padded)[: len(self.total_lengths)],
            num_tokens=self.num_rows // self.cp_size,
            cp_size=self.cp_size,
            cp_rank=cp_rank,
        )


def _cumulative(lengths: Int64) -> NDArray[np.int32]:
    result = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=result[1:])
    return result

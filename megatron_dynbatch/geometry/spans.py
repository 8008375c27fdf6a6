"""`Spans`: one stretch of consecutive rows of a pack for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry.ragged import Int64


@dataclass(frozen=True, eq=False)
class Spans:
    """Which rows of a pack belong to each of B samples.

    Arrays are joined and repeated, not indexed: an index for every row costs ten times as much.

    Attributes:
        starts: int64 [B], first row of each span; spans ascend and do not overlap.
        lengths: int64 [B], rows of each span.
        num_rows: S, rows of the pack.
    """

    starts: Int64
    lengths: Int64
    num_rows: int

    @cached_property
    def _blanks(self) -> Int64:
        """Rows before the first span, between each and the next, and behind the last [B + 1]."""
        ends = np.concatenate([[0], self.starts + self.lengths])
        return np.concatenate([self.starts, [self.num_rows]]) - ends

    def joined(self, parts: Sequence[NDArray], dtype: type | np.dtype) -> NDArray:
        """``parts[i]`` [lengths[i], …] at the rows of span i, 0 elsewhere; [S, …]."""
        blanks = self._blanks.tolist()
        rest = parts[0].shape[1:] if parts else ()
        zeros: NDArray = np.zeros((max(blanks), *rest), dtype=dtype)
        pieces: list[NDArray] = [zeros[: blanks[0]]]
        for part, blank in zip(parts, blanks[1:], strict=True):
            pieces += (part, zeros[:blank])
        result: NDArray = np.empty((self.num_rows, *rest), dtype=dtype)
        np.concatenate(pieces, out=result, casting="unsafe")
        return result

    def filled(self, values: NDArray) -> NDArray:
        """``values[i]`` at every row of span i, 0 elsewhere; [S]."""
        counts = np.empty(2 * len(values) + 1, dtype=np.int64)
        counts[0::2], counts[1::2] = self._blanks, self.lengths
        shown = np.zeros(len(counts), dtype=values.dtype)
        shown[1::2] = values
        return np.repeat(shown, counts)

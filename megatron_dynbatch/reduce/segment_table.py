"""The response pieces of a micro-batch where the operators can read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dynbatch.geometry import ResponsePieces, response_pieces, starts_of
from megatron_dynbatch.reduce import kernels
from megatron_dynbatch.reduce.host_sums import Stretches


@dataclass(frozen=True, eq=False)
class DeviceSegments:
    """A segment table where the operators can read it.

    Attributes:
        pieces: int32 [4, B·P]: x offset, mask offset, length and first tile of each piece.
        sources: int64 [T] entry of the concatenated responses, their number where there is none.
        samples: int64 [T] sample of each position, B where there is none.
    """

    pieces: Tensor
    sources: Tensor | None
    samples: Tensor | None


@dataclass(frozen=True, eq=False)
class SegmentTable(ResponsePieces):
    """Response pieces of a rank, and their copies on devices."""

    _copies: dict[torch.device, DeviceSegments] = field(default_factory=dict, repr=False)

    @cached_property
    def pieces(self) -> NDArray[np.int32]:
        """int32 [4, B·P]: x offset, mask offset, length and first tile of each piece."""
        lengths = self.lengths.ravel()
        tiles = -(-lengths // kernels.TILE)
        rows = [self.x_offsets.ravel(), self.mask_offsets.ravel(), lengths, starts_of(tiles)]
        return np.stack(rows).astype(np.int32)

    @cached_property
    def stretches(self) -> Stretches:
        """The same for sums on the host."""
        return Stretches.of(self.pieces, self.num_tokens)

    def samples_on(self, device: torch.device) -> Tensor:
        """`samples` as a tensor, for the torch implementation where kernels run too."""
        return _copy(self.samples, device)

    def on(self, device: torch.device) -> DeviceSegments:
        """The table on a device, copied once; a GPU is not made to wait.

        Only the pieces go to a GPU whose kernels run, whose size depends on B alone.
        """
        if device not in self._copies:
            pieces_only = device.type == "cuda" and kernels.status(device).active
            self._copies[device] = DeviceSegments(
                pieces=_copy(self.pieces, device),
                sources=None if pieces_only else _copy(self.sources, device),
                samples=None if pieces_only else _copy(self.samples, device),
            )
        return self._copies[device]


def segment_table(*lengths: Any, **options: Any) -> SegmentTable:
    """`response_pieces` of the same arguments, as a table."""
    return table_of(response_pieces(*lengths, **options))


def table_of(pieces: ResponsePieces) -> SegmentTable:
    """The pieces as a table."""
    return SegmentTable(
        x_offsets=pieces.x_offsets,
        mask_offsets=pieces.mask_offsets,
        lengths=pieces.lengths,
        num_tokens=pieces.num_tokens,
        num_mask_entries=pieces.num_mask_entries,
    )


def _copy(array: NDArray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)

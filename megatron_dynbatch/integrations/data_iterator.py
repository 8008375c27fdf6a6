"""`DataIterator`: micro-batches of a rank's samples by the list form of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class DataIterator:
    """Follows `micro_batch_indices` of a schedule over one DP rank's samples.

    Args:
        rollout_data: Key → list with one entry per sample of this DP rank.
        micro_batch_indices: For each micro-batch the local sample indices; a dummy is empty.
    """

    def __init__(
        self,
        rollout_data: Mapping[str, Sequence[Any]],
        micro_batch_indices: Sequence[Sequence[int]],
    ) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The values of ``keys`` for the next micro-batch; None for a key that is absent.

        Raises:
            IndexError: All micro-batches were read; call `reset` first.
        """
        if self.offset == len(self.micro_batch_indices):
            raise IndexError(
                f"all {self.offset} micro-batches were read; call reset() to start again"
            )
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        return {key: self._take(key, indices) for key in keys}

    def _take(self, key: str, indices: Sequence[int]) -> list[Any] | None:
        values = self.rollout_data.get(key)
        return None if values is None else [values[i] for i in indices]

    def reset(self) -> DataIterator:
        """Start again at the first micro-batch."""
        self.offset = 0
        return self


def get_data_iterator(
    rollout_data: Mapping[str, Sequence[Any]],
    micro_batch_indices: Sequence[Sequence[int]],
    num_model_chunks: int = 1,
) -> list[DataIterator]:
    """One `DataIterator` per model chunk (virtual pipeline stage) of this rank."""
    return [DataIterator(rollout_data, micro_batch_indices) for _ in range(num_model_chunks)]

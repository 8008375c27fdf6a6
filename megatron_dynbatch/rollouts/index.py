"""What planning needs to know about the samples of a batch: lengths and ids, as columns.

Invariants (asserted by the tests): an absent id never groups samples; ids of different batches
never meet, whatever their values; `take` and `concat` keep which samples belong together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.limits import MAX_BATCH_ROWS, MAX_SAMPLE_TOKENS
from megatron_dynbatch.rollouts.sample import Sample


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """Lengths and ids of S samples; row i of each column describes sample i.

    Columns may be given as any integer sequence; they are kept as read-only int64 [S].

    Attributes:
        total_lengths: T, tokens of each sample.
        response_lengths: R, response tokens of each sample.
        mask_sums: Trained tokens of each sample.
        rollout_ids: Id of the rollout, −1 = absent (the sample is a rollout of its own).
        group_ids: Id of the prompt group, −1 = absent (the rollout is a group of its own).
        policy_versions: Which weights sampled the rollout, −1 = unknown. Default: all unknown.

    Raises:
        RolloutDataError: Columns of different lengths, or not of integers.
    """

    total_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    mask_sums: NDArray[np.int64]
    rollout_ids: NDArray[np.int64]
    group_ids: NDArray[np.int64]
    policy_versions: NDArray[np.int64] = ()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if isinstance(self.policy_versions, tuple) and not self.policy_versions:
            size = len(_int64_column("total_lengths", self.total_lengths))
            object.__setattr__(self, "policy_versions", np.full(size, -1, np.int64))
        for field in fields(self):
            column = _int64_column(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, column)
        counts = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(counts.values())) > 1:
            raise RolloutDataError(f"columns of a SampleIndex differ in length: {counts}")

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Self:
        """The index of `samples`, row i for `samples[i]`."""

        def column(values: Iterable[int | None]) -> NDArray[np.int64]:
            filled = (-1 if value is None else value for value in values)
            return np.fromiter(filled, np.int64, len(samples))

        return cls(
            column(s.total_length for s in samples),
            column(s.response_length for s in samples),
            column(s.mask_sum for s in samples),
            column(s.rollout_id for s in samples),
            column(s.group_id for s in samples),
            column(s.policy_version for s in samples),
        )

    def __len__(self) -> int:
        return len(self.total_lengths)

    @cached_property
    def rollout_indices(self) -> NDArray[np.int64]:
        """int64 [S], the rollout of each sample: dense 0..G−1 in order of first appearance."""
        own = -2 - np.arange(len(self))  # never a real id, never shared
        return _dense(np.where(self.rollout_ids >= 0, self.rollout_ids, own))

    @cached_property
    def group_indices(self) -> NDArray[np.int64]:
        """int64 [S], the prompt group of each sample: dense, in order of first appearance."""
        own = -2 - self.rollout_indices
        return _dense(np.where(self.group_ids >= 0, self.group_ids, own))

    @property
    def num_rollouts(self) -> int:
        """G, rollouts in the batch."""
        return int(self.rollout_indices.max(initial=-1)) + 1

    @property
    def num_groups(self) -> int:
        """Prompt groups in the batch, rollouts without one counted as their own."""
        return int(self.group_indices.max(initial=-1)) + 1

    def take(self, rows: ArrayLike) -> Self:
        """The index of these rows, in this order; they must be rows of it."""
        picked = np.asarray(rows, np.int64)
        return type(self)(*(getattr(self, field.name)[picked] for field in fields(self)))

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The index of several batches one after the other.

        Ids are unique only within a batch, so present ids are replaced by new ones that no two
        parts share (a single part is returned as it is); absent ids stay absent.
        """
        if len(parts) == 1:
            return parts[0]
        rollout_ids: list[NDArray[np.int64]] = []
        group_ids: list[NDArray[np.int64]] = []
        first_rollout = first_group = 0
        for part in parts:
            new_rollouts = part.rollout_indices + first_rollout
            new_groups = part.group_indices + first_group
            rollout_ids.append(np.where(part.rollout_ids >= 0, new_rollouts, -1))
            group_ids.append(np.where(part.group_ids >= 0, new_groups, -1))
            first_rollout += part.num_rollouts
            first_group += part.num_groups
        return cls(
            _joined([part.total_lengths for part in parts]),
            _joined([part.response_lengths for part in parts]),
            _joined([part.mask_sums for part in parts]),
            _joined(rollout_ids),
            _joined(group_ids),
            _joined([part.policy_versions for part in parts]),
        )

    def check(self, where: str = "samples") -> None:
        """Checks that lengths and ids can be those of real samples.

        Args:
            where: Named at the start of the error, a file for example.

        Raises:
            RolloutDataError: No rows, or more than `MAX_BATCH_ROWS`; or rows without tokens, longer
                than `MAX_SAMPLE_TOKENS`, with a response longer than the sample, with more trained
                tokens than response tokens, with an id below −1, or with another group than their
                rollout's first sample; rows and ids are named.
        """
        if len(self) == 0:
            raise RolloutDataError(f"{where}: no rollouts; give at least one sample")
        if len(self) > MAX_BATCH_ROWS:
            raise RolloutDataError(
                f"{where}: {len(self)} rows; a batch has at most {MAX_BATCH_ROWS}"
            )
        first_of_rollout = np.unique(self.rollout_indices, return_index=True)[1]
        rollout_groups = self.group_ids[first_of_rollout][self.rollout_indices]
        tests = (
            (self.total_lengths < 1, "has no tokens; leave the sample out"),
            (
                self.total_lengths > MAX_SAMPLE_TOKENS,
                f"has more than {MAX_SAMPLE_TOKENS} tokens",
            ),
            (self.response_lengths < 0, "has a negative response length"),
            (self.response_lengths > self.total_lengths, "has more response tokens than tokens"),
            (self.mask_sums < 0, "has a negative number of trained tokens"),
            (self.mask_sums > self.response_lengths, "trains more tokens than its response has"),
            (self.rollout_ids < -1, "has a negative rollout_id; use −1 for an absent one"),
            (self.policy_versions < -1, "has a negative policy_version; use −1 if it is unknown"),
            (self.group_ids < -1, "has a negative group_id; use −1 for an absent one"),
            (self.group_ids != rollout_groups, "has another group_id than its rollout's first row"),
        )
        for is_wrong, what in tests:
            rows = np.flatnonzero(is_wrong)
            if rows.size:
                named = ", ".join(f"{row} (rollout {self.rollout_ids[row]})" for row in rows[:20])
                more = f" and {rows.size - 20} more" if rows.size > 20 else ""
                raise RolloutDataError(f"{where}: each of rows {named}{more} {what}")


def is_row(row: object, num_rows: int) -> bool:
    """Whether something can be the number of one of so many rows."""
    is_integer = isinstance(row, (int, np.integer)) and not isinstance(row, bool)
    return is_integer and 0 <= row < num_rows  # type: ignore[operator]


def _int64_column(name: str, values: Any) -> NDArray[np.int64]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise RolloutDataError(f"{name} of a SampleIndex: {error}; give integers [S]") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RolloutDataError(
            f"{name} of a SampleIndex has shape {array.shape} and dtype {array.dtype}; "
            "give integers [S]"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise RolloutDataError(f"{name} of a SampleIndex has an entry that does not fit in 64 bits")
    column = array.astype(np.int64)
    column.setflags(write=False)
    return column


def _dense(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers equal keys alike, 0 upward in order of first appearance."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse]


def _joined(columns: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(columns) if columns else np.empty(0, np.int64)

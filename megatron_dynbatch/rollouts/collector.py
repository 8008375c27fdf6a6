"""Prompt groups in the order in which they are finished → batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_dynbatch.rollouts.sample import Sample


class RolloutCollector:
    """Collects finished prompt groups and writes a batch whenever there are enough.

    Groups beyond a batch are kept for the next one. A group that would be too old by then is
    dropped and counted. Rollout and group ids are made unique in each batch.

    Args:
        write: Writes a batch and returns its id: `transport.write`, or `write_planned` bound to it.
        groups_per_batch: Prompt groups in a batch.
        first_batch: Id of the next batch; 0 in a new run.
        max_staleness: Largest age of a group in batches, see `Staleness`; None: any.

    Attributes:
        next_batch: Id of the batch that is being collected.
        num_dropped: Groups that were too old.
    """

    def __init__(
        self,
        write: Callable[[list[Sample]], int],
        groups_per_batch: int,
        *,
        first_batch: int = 0,
        max_staleness: int | None = None,
    ) -> None:
        if groups_per_batch < 1:
            raise ValueError(f"groups_per_batch is {groups_per_batch}; give 1 or more")
        self._write = write
        self._groups_per_batch = groups_per_batch
        self._max_staleness = max_staleness
        self._groups: deque[tuple[list[Sample], int]] = deque()
        self.next_batch = first_batch
        self.num_dropped = 0

    def __len__(self) -> int:
        """Groups that wait for their batch."""
        return len(self._groups)

    def batch_of(self, num_in_flight: int) -> int:
        """The batch that a group started now is likely to be in.

        Args:
            num_in_flight: Groups that were started and not added yet.
        """
        return self.next_batch + (len(self) + num_in_flight) // self._groups_per_batch

    def add(self, samples: Sequence[Sample], policy_version: int) -> int | None:
        """Takes a finished group; returns the id of the batch if that completed one.

        Args:
            samples: Of one prompt group; siblings share a rollout_id.
            policy_version: Of the weights that sampled it.

        Raises:
            RolloutDataError: The batch was rejected; see `RolloutTransport.write`.
        """
        if samples:
            stamped = [replace(sample, policy_version=policy_version) for sample in samples]
            self._groups.append((stamped, policy_version))
        self._drop_stale()
        if len(self._groups) < self._groups_per_batch:
            return None
        taken = [self._groups[number][0] for number in range(self._groups_per_batch)]
        batch_id = self._write(_one_batch(taken))
        for _ in taken:  # only now: a write that failed can be tried again
            self._groups.popleft()
        self.next_batch = batch_id + 1
        return batch_id

    def _drop_stale(self) -> None:
        if self._max_staleness is None:
            return
        oldest = self.next_batch - self._max_staleness
        fresh = [group for group in self._groups if group[1] >= oldest]
        self.num_dropped += len(self._groups) - len(fresh)
        self._groups = deque(fresh)


def _one_batch(groups: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The samples of several groups, with ids that are unique among them."""
    samples: list[Sample] = []
    next_rollout = 0
    for group_id, group in enumerate(groups):
        numbers: dict[int, int] = {}
        for sample in group:
            if (rollout_id := sample.rollout_id) is not None:
                rollout_id = numbers.setdefault(rollout_id, next_rollout + len(numbers))
            samples.append(replace(sample, rollout_id=rollout_id, group_id=group_id))
        next_rollout += len(numbers)
    return samples

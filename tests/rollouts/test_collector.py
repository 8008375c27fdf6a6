"""Finished groups to batches: none lost, none doubled, the surplus kept, the too old counted."""

from __future__ import annotations

import pytest

from megatron_dynbatch.rollouts import RolloutCollector, RolloutQueue, Sample
from megatron_dynbatch.rollouts.flow import (
    NoRoom,
    publish_weights,
    published_weights,
    wait_for_weights,
)


def group(number: int) -> list[Sample]:
    """Two rollouts, the first of two samples; tokens tell the group."""
    return [Sample([number, 7, k], 1, rollout_id=k // 2, group_id=0) for k in range(3)]


def first_tokens(queue: RolloutQueue, batch: int) -> list[int]:
    samples = queue.read(batch, range(len(queue.index(batch))))
    return [int(sample.tokens[0]) for sample in samples[::3]]


def test_the_surplus_is_kept_for_the_next_batch() -> None:
    queue = RolloutQueue()
    collector = RolloutCollector(queue.write, groups_per_batch=3)
    written = [collector.add(group(number), policy_version=0) for number in range(8)]
    assert written == [None, None, 0, None, None, 1, None, None]
    assert [first_tokens(queue, b) for b in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert len(collector) == 2 and collector.next_batch == 2
    assert [collector.batch_of(n) for n in (0, 1, 3, 4)] == [2, 3, 3, 4]
    index = queue.index(0)
    assert index.rollout_ids.tolist() == [0, 0, 1, 2, 2, 3, 4, 4, 5]
    assert index.group_ids.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert index.policy_versions.tolist() == [0] * 9


def test_groups_too_old_for_their_batch_are_dropped_and_counted() -> None:
    queue = RolloutQueue()
    collector = RolloutCollector(queue.write, groups_per_batch=2, max_staleness=1)
    for number, version in enumerate([0, 0, 0, 0, 0, 1, 2, 1, 2]):
        collector.add(group(number), version)
    # Batch 2 takes no group of version 0, batch 3 none of version 1.
    assert [first_tokens(queue, b) for b in range(3)] == [[0, 1], [2, 3], [5, 6]]
    assert collector.num_dropped == 2 and len(collector) == 1


def test_a_failed_write_loses_no_group() -> None:
    queue = RolloutQueue()
    failures = [OSError("disk full")]

    def write(samples: list[Sample]) -> int:
        if failures:
            raise failures.pop()
        return queue.write(samples)

    collector = RolloutCollector(write, groups_per_batch=2)
    collector.add(group(0), 0)
    with pytest.raises(OSError, match="disk full"):
        collector.add(group(1), 0)
    assert collector.add([], 0) == 0
    assert first_tokens(queue, 0) == [0, 1] and len(collector) == 0


def test_generation_waits_for_weights_that_are_new_enough() -> None:
    queue = RolloutQueue()
    assert published_weights(queue) is None
    with pytest.raises(NoRoom, match=r"version 0 or newer .* \(none there\)"):
        wait_for_weights(queue, 0, timeout=0.1)
    publish_weights(queue, 3, "somewhere")
    assert wait_for_weights(queue, 2) == (3, "somewhere")
    with pytest.raises(NoRoom, match=r"version 4 or newer .* \(version 3 there\)"):
        wait_for_weights(queue, 4, timeout=0.1)

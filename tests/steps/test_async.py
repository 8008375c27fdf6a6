"""Generation in another thread, ahead of training: every rollout once, none too old."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from megatron_dynbatch.handshake import write_planned
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutCollector, RolloutQueue, Sample
from megatron_dynbatch.rollouts.flow import publish_weights, wait_for_weights
from megatron_dynbatch.steps import Cursor, LoadedBatch, Staleness, StepFeed

NUM_BATCHES, GROUPS = 8, 3


def generate(queue: RolloutQueue, limit: int, ledger: list[tuple[int, int]]) -> None:
    """Write the batches; note the version of each group's weights."""
    collector = RolloutCollector(partial(write_planned, queue), GROUPS, max_staleness=limit)
    group = 0
    while collector.next_batch < NUM_BATCHES:
        version, _ = wait_for_weights(queue, collector.batch_of(0) - limit, timeout=60)
        ledger.append((group, version))
        collector.add([Sample([group, 7, k], 1, rollout_id=k) for k in range(2)], version)
        group += 1
    assert collector.num_dropped == 0
    queue.finish()


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_no_trained_rollout_is_staler_than_the_limit(limit: int) -> None:
    queue = RolloutQueue()
    feed = StepFeed(
        queue, ParallelLayout(), PlanOptions(max_tokens_per_gpu=64), staleness=Staleness(limit)
    )

    def when_needed(cursor: Cursor) -> None:
        publish_weights(queue, cursor.batch_id, "")

    def when_opened(batch: LoadedBatch) -> dict[int, Sample]:
        publish_weights(queue, batch.batch_id, "")
        return batch.samples

    feed.on_batch_needed, feed.on_batch_opened = when_needed, when_opened
    ledger: list[tuple[int, int]] = []
    thread = threading.Thread(target=generate, args=(queue, limit, ledger))
    thread.start()
    trained: list[int] = []
    while (step := feed.open_step()) is not None:
        samples = [step.samples[row] for row in step.step_plan.samples]
        versions = [s.policy_version for s in samples]
        assert all(v is not None and 0 <= step.batch_id - v <= limit for v in versions)
        trained += [int(sample.tokens[0]) for sample in samples]
        feed.finish_step()
    thread.join(60)
    assert trained == [group for group in range(NUM_BATCHES * GROUPS) for _ in range(2)]
    assert feed.cursor.stale_rollouts == 0
    assert all(version <= group // GROUPS for group, version in ledger)  # none from the future

"""The ledger adds up under every policy and restart, and shows what is missing or doubled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutQueue, Sample
from megatron_dynbatch.steps import Cursor, Staleness, StepFeed
from megatron_dynbatch.steps.ledger import Ledger, imbalance, read_ledger

SIZES = (7, 2, 5)


def rollouts() -> RolloutQueue:
    """Rollouts of one or two samples; one of each batch is too long, one too old, one empty."""
    queue = RolloutQueue("rollouts")
    for batch, size in enumerate(SIZES):
        samples = []
        for rollout in range(size):
            version = 0 if rollout == 1 else batch
            for k in range(1 + rollout % 2):
                length = 40 if (rollout, k) in ((3, 1), (4, 0)) else 3
                mask = [0, 0] if rollout == 2 else [1, 1]
                samples.append(
                    Sample(
                        [1] * (length - 2) + [2, 3],
                        loss_mask=mask,
                        rollout_id=rollout,
                        policy_version=version,
                    )
                )
        queue.write(samples)
    queue.finish()
    return queue


def feed(queue: RolloutQueue, leftover: str, path: Path) -> StepFeed:
    options = PlanOptions(
        max_tokens_per_gpu=16, rollouts_per_step=3, leftover=leftover, oversize="drop"
    )
    return StepFeed(
        queue, ParallelLayout(), options, staleness=Staleness(1), ledger=Ledger(path)
    )


def train(steps: StepFeed, limit: int = 100) -> list[Cursor]:
    """The cursor before each step, and at the end."""
    cursors = [steps.cursor]
    while len(cursors) <= limit and steps.open_step() is not None:
        steps.finish_step()
        cursors.append(steps.cursor)
    steps.close()
    return cursors


@pytest.mark.parametrize("leftover", ["partial", "even", "carry", "drop"])
def test_every_rollout_is_there_once_whatever_happens(leftover: str, tmp_path: Path) -> None:
    queue, whole = rollouts(), tmp_path / "whole"
    cursors = train(feed(queue, leftover, whole))
    assert imbalance(read_ledger(whole), queue, len(SIZES)) == []
    entries = read_ledger(whole)
    assert sum(len(e.consumed) for e in entries) == cursors[-1].consumed_rollouts
    assert sum(e.trained_tokens for e in entries) > 0
    # A run that was stopped at any step, and went on from any step before, tells the same.
    for start in range(len(cursors) - 1):
        for stop in range(start + 1, len(cursors)):
            path = tmp_path / f"{start}-{stop}"
            train(feed(queue, leftover, path), limit=stop)
            resumed = feed(queue, leftover, path)
            resumed.restore(Cursor.from_dict(cursors[start].to_dict()))
            train(resumed)
            assert read_ledger(path) == entries


def test_what_is_lost_or_doubled_is_named(tmp_path: Path) -> None:
    queue, path = rollouts(), tmp_path / "ledger"
    train(feed(queue, "partial", path))
    entries = read_ledger(path)
    assert entries[0].consumed == ((0, 0), (0, 1), (0, 3))
    lost = [replace(entries[0], consumed=entries[0].consumed[1:]), *entries[1:]]
    assert imbalance(lost, queue, len(SIZES)) == [
        "rollout 0 (in order of appearance) of batch 0 is there 0 times"
    ]
    doubled = [*entries, replace(entries[0], batch_id=9, consumed=((1, 0),))]
    assert imbalance(doubled, queue, len(SIZES)) == [
        "rollout 0 (in order of appearance) of batch 1 is there 2 times"
    ]


def test_of_a_deleted_batch_only_what_is_doubled_is_named(tmp_path: Path) -> None:
    queue, path = rollouts(), tmp_path / "ledger"
    train(feed(queue, "partial", path))
    entries = read_ledger(path)
    queue.delete_before(1)
    assert imbalance(entries, queue, len(SIZES)) == []
    doubled = [*entries, replace(entries[0], batch_id=9, consumed=((0, 3), (1, 0)))]
    assert imbalance(doubled, queue, len(SIZES)) == [
        "the rollout of row 3 of batch 0, which was deleted, is there 2 times",
        "rollout 0 (in order of appearance) of batch 1 is there 2 times",
    ]


def test_a_last_line_cut_short_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    train(feed(rollouts(), "partial", path))
    entries = read_ledger(path)
    text = path.read_text()
    path.write_text(text[:-5])
    assert read_ledger(path) == entries[:-1]
    assert json.loads(text.splitlines()[0])["consumed"] == [[0, 0], [0, 1], [0, 3]]

"""Plans made by the rollout side: written with the samples, checked by the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dynbatch.handshake import (
    checked_plan,
    plan_text,
    publish_layout,
    rows_by_rank,
    write_planned,
)
from megatron_dynbatch.plan import ParallelLayout, PlanError, PlanOptions, make_plan
from megatron_dynbatch.rollouts import RolloutDirectory, RolloutQueue, SampleIndex
from tests.rollouts.helpers import assert_same_samples, random_samples

LAYOUT = ParallelLayout(dp=2, cp=2)
OPTIONS = PlanOptions(max_tokens_per_gpu=64, rollouts_per_step=5, loss_reduction="token")


def test_the_rollout_side_plans_as_the_trainer_would(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path)
    publish_layout(directory, LAYOUT, OPTIONS)
    samples = random_samples(40, seed=1)
    assert write_planned(directory, samples, key="first") == 0
    assert write_planned(directory, samples, key="first") == 0
    text, index = directory.plan_json(0), directory.index(0)
    assert text is not None
    plan = checked_plan(text, index, LAYOUT, OPTIONS)
    assert plan.fingerprint == make_plan(index, LAYOUT, OPTIONS).fingerprint
    for rank, rows in enumerate(rows_by_rank(plan)):
        assert_same_samples(directory.read(0, rows), [samples[row] for row in rows])
        assert (tmp_path / "batch-00000000" / f"part-{rank:05d}.parquet").exists()
    assert sorted(row for rows in rows_by_rank(plan) for row in rows) == list(range(40))


def test_without_a_published_layout_there_is_no_plan() -> None:
    queue = RolloutQueue()
    write_planned(queue, random_samples(4, seed=0))
    assert queue.plan_json(0) is None


def test_a_plan_that_does_not_fit_says_what_does_not() -> None:
    index = SampleIndex.from_samples(random_samples(30, seed=2))
    text = plan_text(make_plan(index, LAYOUT, OPTIONS))
    checked_plan(text, index, LAYOUT, OPTIONS)
    other_index = SampleIndex.from_samples(random_samples(30, seed=3))
    cases = [
        (text.replace('"version":1', '"version":2'), index, LAYOUT, OPTIONS, "fingerprint"),
        ("no plan", index, LAYOUT, OPTIONS, "fingerprint"),
        (text, index, replace(LAYOUT, dp=4), OPTIONS, r"another layout \(dp=2\)"),
        (text, index, LAYOUT, replace(OPTIONS, max_tokens_per_gpu=32), "another options .*=64"),
        (text, other_index, LAYOUT, OPTIONS, "its total_lengths are not those of the batch"),
        (text, index.take(range(29)), LAYOUT, OPTIONS, "are not those of the batch"),
    ]
    for case in cases:
        with pytest.raises(PlanError, match=case[-1]):  # type: ignore[arg-type]
            checked_plan(*case[:-1])  # type: ignore[arg-type]

"""What rank 0 says of a batch: which samples are trained, by whose plan, which are too old."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dynbatch.errors import OptionError, ResumeError
from megatron_dynbatch.handshake import publish_layout, write_planned
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanError, PlanOptions, make_plan
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, Sample, SampleIndex
from megatron_dynbatch.steps import Cursor, Staleness, announce
from megatron_dynbatch.steps.announce import Announcer
from megatron_dynbatch.steps.announcement import Announcement, rows_by_batch

LAYOUT = ParallelLayout()


def samples(*versions: int | None) -> list[Sample]:
    """Rollouts of one sample each, of these versions."""
    return [
        Sample([n, 7, 7], 1, rollout_id=n, policy_version=version)
        for n, version in enumerate(versions)
    ]


@pytest.fixture
def source(tmp_path: Path) -> RolloutDirectory:
    """Three batches; the last one's first two rollouts are of version 0."""
    directory = RolloutDirectory(tmp_path / "rollouts")
    directory.write(samples(0, 0, 0))
    directory.write(samples(1, 1))
    directory.write(samples(0, 0, 2, None))
    return directory


def announcer(
    source: RolloutDirectory, staleness: Staleness | None = None, **options: Any
) -> Announcer:
    chosen = PlanOptions(max_tokens_per_gpu=12, **options)
    return Announcer(source, LAYOUT, chosen, staleness or Staleness())


def steps_of(said: Announcement) -> list[list[int]]:
    """Plan rows of each step."""
    return [sorted(step.samples) for step in Plan.from_json(said.plan).steps]


def test_a_batch_that_is_there_is_planned_whole(source: RolloutDirectory) -> None:
    said = announcer(source, rollouts_per_step=2).announce(Cursor(), "present")
    assert steps_of(said) == [[0, 1], [2]]
    identity = {
        "source_id": source.source_id(),
        "source_name": str(source),
        "stamps": {0: source.content_stamp(0)},
    }
    assert replace(said, plan="") == Announcement(
        "plan", origins=((0, 0), (0, 1), (0, 2)), source=identity
    )
    # As the other ranks get it: JSON has no tuples.
    assert Announcement.from_dict(json.loads(json.dumps(said.to_dict()))).origins == said.origins


def test_carried_samples_come_first_and_are_stamped_too(source: RolloutDirectory) -> None:
    carrying = Cursor(batch_id=2, carried=((0, 2), (1, 1)))
    said = announcer(source, rollouts_per_step=4, leftover="carry").announce(carrying, "present")
    assert list(said.origins) == [(0, 2), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]
    assert steps_of(said) == [[0, 1, 2, 3]]  # two are carried on
    assert said.source["stamps"] == {n: source.content_stamp(n) for n in range(3)}


def test_at_the_end_what_is_carried_is_trained(source: RolloutDirectory) -> None:
    carrying = Cursor(batch_id=3, carried=((0, 2), (2, 1)))
    said = announcer(source, rollouts_per_step=4, leftover="carry").announce(carrying, "end")
    assert list(said.origins) == [(0, 2), (2, 1)] and steps_of(said) == [[0, 1]]
    assert set(said.source["stamps"]) == {0, 2}


def test_the_end_with_nothing_left(source: RolloutDirectory) -> None:
    rank = announcer(source)
    assert rank.announce(Cursor(batch_id=3), "end") == Announcement("end")
    assert rank.announce(Cursor(batch_id=1), "end") == Announcement("end")
    with pytest.raises(RolloutDataError, match="was closed without a single rollout"):
        rank.announce(Cursor(), "end")


def test_a_carried_row_that_its_batch_does_not_have(source: RolloutDirectory) -> None:
    rank = announcer(source)
    rank.announce(Cursor(batch_id=2, carried=((1, 1),)), "present")
    with pytest.raises(ResumeError, match="carries row 2 of rollout batch 1, .* rows 0 to 1"):
        rank.announce(Cursor(batch_id=2, carried=((1, 0), (1, 2))), "present")


def test_a_plan_that_is_not_right_is_not_announced(
    source: RolloutDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(*positional: Any, **named: Any) -> Plan:
        plan = make_plan(*positional, **named)
        return replace(plan, steps=plan.steps * 2)

    monkeypatch.setattr(announce, "make_plan", doubled)
    with pytest.raises(PlanError):
        announcer(source).announce(Cursor(), "present")


def test_whose_plan_it_is_is_said_once_for_each_reason(
    source: RolloutDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = announcer(source)
    for _ in range(2):
        rank.announce(Cursor(), "present")
    source.write(samples(3), plan_json="{}")
    for _ in range(2):
        rank.announce(Cursor(batch_id=3), "present")
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("rollout batch 0 came without a plan; rank 0 plans it (said once)")
    assert "rollout batch 3 has a plan that is not used: " in second


def test_the_rollout_sides_plan_of_a_whole_batch_is_taken(
    source: RolloutDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_layout(source, LAYOUT, PlanOptions(max_tokens_per_gpu=12))
    write_planned(source, samples(3, 3))
    monkeypatch.setattr(announce, "make_plan", None)
    assert steps_of(announcer(source).announce(Cursor(batch_id=3), "present")) == [[0, 1]]


def test_nobody_asks_for_a_plan_of_a_part_of_a_batch(
    source: RolloutDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    announcer(source).announce(Cursor(batch_id=1, carried=((0, 0),)), "present")
    announcer(source).announce(Cursor(batch_id=3, carried=((0, 0),)), "end")
    announcer(source, Staleness(1)).announce(Cursor(batch_id=2), "present")
    assert "came without a plan" not in capsys.readouterr().out


def test_old_rollouts_are_dropped_and_told(
    source: RolloutDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    said = announcer(source, Staleness(1)).announce(Cursor(batch_id=2), "present")
    assert list(said.origins) == [(2, 2), (2, 3)] and steps_of(said) == [[0, 1]]
    assert (said.stale_rollouts, said.dropped_rollouts) == (2, 2)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("rollout batch 2: 2 rollouts dropped, older than 1 batch")


def test_old_rollouts_are_trained_and_counted(source: RolloutDirectory) -> None:
    said = announcer(source, Staleness(1, "train")).announce(Cursor(batch_id=2), "present")
    assert len(said.origins) == 4
    assert (said.stale_rollouts, said.dropped_rollouts) == (2, 0)


def test_young_rollouts_are_not_spoken_of(
    source: RolloutDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    said = announcer(source, Staleness(2)).announce(Cursor(batch_id=2), "present")
    assert (said.stale_rollouts, said.dropped_rollouts) == (0, 0)
    assert "dropped" not in capsys.readouterr().out


def test_a_batch_that_is_too_old_altogether(source: RolloutDirectory) -> None:
    source.write(samples(0, 1))
    said = announcer(source, Staleness(1)).announce(Cursor(batch_id=3), "present")
    assert said == Announcement("nothing", stale_rollouts=2, dropped_rollouts=2)


@pytest.mark.parametrize(
    ("limit", "stale"),
    [
        (None, [False] * 6),
        (1, [True, False, True, True, False, False]),
        (0, [True, False, True, True, True, False]),
        (2, [False] * 6),
    ],
)
def test_a_rollout_is_as_old_as_its_oldest_sample(limit: int | None, stale: list[bool]) -> None:
    """In batch 2 version 0 is two batches old; -1 is not known."""
    rollouts = [(0, 0), (1, -1), (2, 2), (2, 0), (3, 1), (4, 2)]
    index = SampleIndex.from_samples(
        [Sample([1, 2], 1, rollout_id=r, policy_version=None if v < 0 else v) for r, v in rollouts]
    )
    found = Staleness(limit).is_stale(index, 2)
    assert found.dtype == np.bool_ and found.tolist() == stale


def test_limits_and_policies_of_staleness() -> None:
    assert Staleness(0).limit == 0 and Staleness().limit is None
    with pytest.raises(OptionError, match="maximum staleness is -1"):
        Staleness(-1)
    with pytest.raises(OptionError, match="stale policy 'keep': one of drop, train"):
        Staleness(1, "keep")  # type: ignore[arg-type]


def test_rows_of_each_batch_keep_their_order() -> None:
    assert rows_by_batch([(2, 5), (0, 1), (2, 3), (0, 0)]) == {2: [5, 3], 0: [1, 0]}

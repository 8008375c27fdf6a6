"""kill -9 anywhere, then a restart: the run goes on as if nothing had been (`make kills`: 20)."""

from __future__ import annotations

import math
import os
from dataclasses import astuple
from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDirectory
from megatron_dynbatch.steps.ledger import imbalance, read_ledger
from tests.parity.layouts import Layout
from tests.parity.rollouts import make_steps, write_batches
from tests.reliability.kills import BATCHES, NUM_STEPS, TOTAL, Kill, Row, random_kills, rows, run

SAME = Layout(dp=2)
OTHER = Layout(pp=2)
SEED = 5

# (kill, layout of the restart)
FEW = [
    (Kill("checkpoint write", 2, (0,)), SAME),
    (Kill("optimizer step", 3, (0, 1)), OTHER),
    (Kill("hand-over", 3, (1,)), SAME),
]
MANY = [
    (kill, layout)
    for kill, layout in zip(random_kills(20, SEED), [SAME, SAME, OTHER, Layout()] * 5, strict=True)
]
CASES = MANY if os.environ.get("KILLS") == "full" else FEW

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills") / "rollouts"
    write_batches(path, make_steps(BATCHES, seed=2))
    return path


@pytest.fixture(scope="module")
def uninterrupted(rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(rollouts, folder, SAME)
    found = rows(folder)
    assert [row.iteration for row in found] == list(range(1, NUM_STEPS + 1))
    return found


@pytest.mark.parametrize(("kill", "layout"), CASES, ids=lambda value: str(value))
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    kill: Kill, layout: Layout, rollouts: Path, uninterrupted: list[Row], tmp_path: Path
) -> None:
    run(rollouts, tmp_path, SAME, kill)
    before = len(rows(tmp_path)) if (tmp_path / "steps.jsonl").exists() else 0
    run(rollouts, tmp_path, layout)
    found = rows(tmp_path)
    # Steps after the last checkpoint are logged twice; the last word on each is the whole run.
    assert {row.iteration for row in found} == set(range(1, NUM_STEPS + 1))
    assert found[-1].iteration == NUM_STEPS
    for number, row in enumerate(found):
        wanted = uninterrupted[row.iteration - 1]
        if layout == SAME or number < before:
            assert row == wanted
        else:
            assert all(map(_is_close, astuple(row), astuple(wanted))), (row, wanted)
    entries = read_ledger(tmp_path / "ledger.jsonl")
    assert imbalance(entries, RolloutDirectory(rollouts), len(BATCHES)) == []
    assert sum(len(entry.consumed) for entry in entries) == TOTAL


def _is_close(found: float, wanted: float) -> bool:
    return math.isclose(found, wanted, rel_tol=1e-5, abs_tol=1e-9)


def test_every_point_is_among_the_random_kills() -> None:
    kills = random_kills(20, SEED)
    assert {kill.point for kill in kills} == {
        "read", "forward", "optimizer step", "checkpoint write", "hand-over"
    }  # fmt: skip
    assert {kill.ranks for kill in kills} == {(0,), (1,), (0, 1)}

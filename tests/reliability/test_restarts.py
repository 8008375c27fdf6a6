"""Whoever starts the ranks again, the run goes on at the cursor (torchrun's own processes)."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps.ledger import imbalance, read_ledger
from tests.parity.job import Cell
from tests.parity.reference import Recipe
from tests.parity.rollouts import make_steps, write_batches
from tests.reliability.killed_script import KILL
from tests.reliability.kills import BATCHES, NUM_STEPS, TOTAL, Row, rows, run_flags
from tests.reliability.launcher import FORMS, torchrun
from tests.reliability.restarting_loop import RATE, WIDTH

LOOP = Path(__file__).with_name("restarting_loop.py")
# Rollouts of each step: two batches of five, two a step.
STEPS = (2, 2, 1, 2, 2, 1)
RESPONSE = 4


def write_rollouts(path: Path) -> list[list[list[int]]]:
    """The tokens of each step's rollouts."""
    directory = RolloutDirectory(path)
    samples = [list(range(n, 2 * n + 8)) for n in range(sum(STEPS))]
    for first in (0, 5):
        batch = samples[first : first + 5]
        directory.write([Sample(t, RESPONSE, rollout_id=n) for n, t in enumerate(batch)])
    directory.finish()
    ends = [sum(STEPS[: n + 1]) for n in range(len(STEPS))]
    return [samples[end - size : end] for end, size in zip(ends, STEPS, strict=True)]


def expected_weights(steps: list[list[list[int]]]) -> list[list[float]]:
    """After each step; few enough bits that float64 holds them, in whatever order one adds."""
    weights, found = [Fraction(1)] * WIDTH, []
    for rollouts in steps:
        # Token j of the response is predicted where the token before it stands.
        counts = Counter(token for tokens in rollouts for token in tokens[-RESPONSE - 1 : -1])
        gradient = {t: Fraction(n, RESPONSE * len(rollouts)) for t, n in counts.items()}
        weights = [w * (1 - Fraction(RATE) * gradient.get(t, 0)) for t, w in enumerate(weights)]
        found.append([float(w) for w in weights])
    return found


@pytest.mark.parametrize(
    "form", [FORMS[0], *(pytest.param(form, marks=pytest.mark.slow) for form in FORMS[1:])]
)
def test_torchrun_starts_a_loop_of_ones_own_again(form: str, tmp_path: Path) -> None:
    wanted = expected_weights(write_rollouts(tmp_path / "rollouts"))
    done = torchrun(form, LOOP, tmp_path, 4, restarts=1)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    # The last save is of step 2.
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6]
    for line in lines:
        assert line["G"] == STEPS[line["step"] - 1]
        assert line["weights"] == wanted[line["step"] - 1]


# Where a rank dies (see `kills.POINTS`), and steps that are trained twice then.
DEATHS = [
    ("static", "forward|10|1", {3}),  # in the fourth step, after the first checkpoint
    ("standalone", "checkpoint write|1|0", {1, 2}),  # the first checkpoint is not completed
    ("c10d", "forward|2|0", set()),  # before any step
]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("restarts") / "rollouts"
    write_batches(path, make_steps(BATCHES, seed=2))
    return path


def pretrain(rollouts: Path, folder: Path, form: str, death: str | None, restarts: int = 0) -> int:
    """Train with one command, the same at every start; returns torchrun's exit code."""
    flags = {**run_flags(rollouts, folder), "load": folder / "checkpoints"}
    argv = Cell(2, flags, Recipe(decay=TOTAL, warmup=4)).argv()
    environment = {} if death is None else {KILL: f"{death}|{folder / 'killed'}"}
    done = torchrun(
        form, "-m", "megatron_dynbatch.run", "--cpu", "--module", "tests.reliability.killed_script",
        *argv, restarts=restarts, environment=environment,
    )  # fmt: skip
    (folder / "stderr").write_text(done.stderr)
    return done.returncode


@pytest.fixture(scope="module")
def uninterrupted(rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert pretrain(rollouts, folder, "standalone", None) == 0
    found = rows(folder)
    assert [row.iteration for row in found] == list(range(1, NUM_STEPS + 1))
    return found


def check_whole(folder: Path, rollouts: Path, wanted: list[Row], twice: set[int]) -> None:
    """Every step is that of the uninterrupted run to the bit; the ledger balances."""
    found = rows(folder)
    counts = Counter(row.iteration for row in found)
    assert counts == {n: 1 + (n in twice) for n in range(1, NUM_STEPS + 1)}
    assert found == [wanted[row.iteration - 1] for row in found]
    entries = read_ledger(folder / "ledger.jsonl")
    assert imbalance(entries, RolloutDirectory(rollouts), len(BATCHES)) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("form", "death", "twice"), DEATHS)
def test_max_restarts_goes_on_at_the_cursor(
    form: str, death: str, twice: set[int], rollouts: Path, uninterrupted: list[Row], tmp_path: Path
) -> None:
    code = pretrain(rollouts, tmp_path, form, death, restarts=1)
    assert code == 0, (tmp_path / "stderr").read_text()[-3000:]
    assert (tmp_path / "killed").exists()
    check_whole(tmp_path, rollouts, uninterrupted, twice)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_same_command_started_again_goes_on_at_the_cursor(
    rollouts: Path, uninterrupted: list[Row], tmp_path: Path
) -> None:
    assert pretrain(rollouts, tmp_path, "static", "forward|10|1") != 0
    assert len(rows(tmp_path)) < NUM_STEPS
    code = pretrain(rollouts, tmp_path, "static", None)
    assert code == 0, (tmp_path / "stderr").read_text()[-3000:]
    check_whole(tmp_path, rollouts, uninterrupted, {3})

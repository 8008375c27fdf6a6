"""torchrun starts the ranks of a loop of one's own again; it goes on (Megatron: test_kills)."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDirectory, Sample
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

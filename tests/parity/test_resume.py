"""Left-over policies, and a training that stops, saves and goes on at the next rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parity.compare import deviations
from tests.parity.job import OWN_SCRIPT, Cell, Observed, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, ReferenceStep, train
from tests.parity.rollouts import CAPACITY, Example, make_steps, write_batches

PER_STEP = 5
BATCHES = (12, 12)
TOTAL = sum(BATCHES)

RECIPE = Recipe(decay=TOTAL, clip_grad=0.0, epsilon=1e-8)

# Rollouts of each step, in order of arrival; `drop` leaves out the last two of each batch.
STEPS = {
    "partial": (5, 5, 2, 5, 5, 2),
    "even": (4, 4, 4, 4, 4, 4),
    "carry": (5, 5, 5, 5, 4),
    "drop": (5, 5, 5, 5),
}


@pytest.fixture(scope="module")
def batches() -> list[list[Example]]:
    return make_steps(BATCHES, seed=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, batches: list[list[Example]]) -> Path:
    path = tmp_path_factory.mktemp("resume") / "directory"
    write_batches(path, batches)
    return path


def expected(batches: Sequence[Sequence[Example]], leftover: str) -> list[ReferenceStep]:
    """The independent loop over the steps that the policy makes."""
    examples = [example for batch in batches for example in batch]
    rollouts = list(dict.fromkeys(example.rollout for example in examples))
    if leftover == "drop":
        rollouts = [r for r in rollouts if r % BATCHES[0] < 2 * PER_STEP]
    steps = []
    for size in STEPS[leftover]:
        taken, rollouts = rollouts[:size], rollouts[size:]
        steps.append([example for example in examples if example.rollout in taken])
    return train(steps, RECIPE)


def run(path: Path, layout: Layout, leftover: str, **flags: object) -> list[Observed]:
    """Train in float64; flags with underscores for hyphens."""
    options: dict[str, object] = {
        "dynamic-global-batch": True,
        "rollout-path": path,
        "rollouts-per-step": PER_STEP,
        "max-tokens-per-gpu": CAPACITY,
        "leftover": leftover,
        "train-samples": TOTAL,
        **layout.flags(),
        **{name.replace("_", "-"): value for name, value in flags.items()},
    }
    return run_cell(
        Cell(
            layout.ranks,
            options,
            RECIPE,
            script=OWN_SCRIPT,
            overwrite_weights="load" not in flags,
        )
    )


def assert_equal(observed: list[Observed], reference: list[ReferenceStep]) -> None:
    found = deviations(observed, reference)
    assert max(found["metrics"], found["gradients"], found["parameters"]) < 1e-9
    assert found["learning rate"] < 1e-12
    assert found["consumed"] == 0


@pytest.mark.parametrize("leftover", STEPS)
def test_resumed_training_goes_on_at_the_next_rollout(
    leftover: str, batches: list[list[Example]], path: Path, tmp_path: Path
) -> None:
    # Two of three steps of a batch are trained: the checkpoint lies inside it (or, with `carry`
    # and `drop`, after it).
    reference = expected(batches, leftover)
    first = run(path, Layout(), leftover, save=tmp_path, save_interval=100, exit_interval=2)
    assert_equal(first, reference[:2])
    second = run(path, Layout(), leftover, load=tmp_path)
    assert second[0].rows[0]["iteration"] == 3
    assert_equal(second, reference[2:])


def test_saved_under_one_layout_and_resumed_under_another(
    batches: list[list[Example]], path: Path, tmp_path: Path
) -> None:
    reference = expected(batches, "partial")
    save = {"save": tmp_path, "save_interval": 100, "exit_interval": 4}
    assert_equal(run(path, Layout(dp=2), "partial", **save), reference[:4])
    assert_equal(run(path, Layout(pp=2), "partial", load=tmp_path), reference[4:])


def test_options_that_form_steps_must_not_change_inside_a_batch(path: Path, tmp_path: Path) -> None:
    run(path, Layout(), "partial", save=tmp_path, save_interval=100, exit_interval=1)
    with pytest.raises(AssertionError, match="planned with leftover='partial', but now"):
        run(path, Layout(), "even", load=tmp_path)

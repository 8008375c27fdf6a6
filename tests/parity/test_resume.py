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

# After each step: batch, next step of it, rollouts trained, carried and dropped so far.
CURSORS: dict[str, tuple[tuple[int, int, int, tuple[int, ...], int], ...]] = {
    "partial": (
        (0, 1, 5, (), 0), (0, 2, 10, (), 0), (1, 0, 12, (), 0),
        (1, 1, 17, (), 0), (1, 2, 22, (), 0), (2, 0, 24, (), 0),
    ),
    "even": (
        (0, 1, 4, (), 0), (0, 2, 8, (), 0), (1, 0, 12, (), 0),
        (1, 1, 16, (), 0), (1, 2, 20, (), 0), (2, 0, 24, (), 0),
    ),
    "carry": (
        (0, 1, 5, (), 0), (1, 0, 10, (10, 11), 0), (1, 1, 15, (10, 11), 0),
        (2, 0, 20, (20, 21, 22, 23), 0), (3, 0, 24, (), 0),
    ),
    "drop": ((0, 1, 5, (), 0), (1, 0, 10, (), 2), (1, 1, 15, (), 2), (2, 0, 20, (), 4)),
}  # fmt: skip


def assert_cursors(
    observed: Sequence[Observed], batches: Sequence[Sequence[Example]], leftover: str, steps: slice
) -> None:
    """Every field, on every rank, after each of these steps."""
    carried_from = {e.rollout: b for b, batch in enumerate(batches) for e in batch}
    expected_cursors = []
    for batch, step, consumed, carried, dropped in CURSORS[leftover][steps]:
        rows = [
            (carried_from[rollout], row)
            for rollout in carried
            for row, e in enumerate(batches[carried_from[rollout]])
            if e.rollout == rollout
        ]
        expected_cursors.append(
            {
                "batch_id": batch,
                "step_index": step,
                "carried": tuple(rows),
                "consumed_rollouts": consumed,
                "dropped_rollouts": dropped,
                "empty_steps": 0,
                "stale_rollouts": 0,
                # Inside a batch its options are held fast, between batches there are none.
                "step_options": {
                    "rollouts_per_step": PER_STEP,
                    "leftover": leftover,
                    "loss_reduction": "rollout",
                    "step_splitter": "rollouts",
                }
                if step
                else None,
            }
        )
    digests = [cursor["steps_digest"] for cursor in observed[0].cursors]
    assert [digest is None for digest in digests] == [
        not cursor["step_index"] for cursor in expected_cursors
    ]
    for one in observed:
        assert [cursor["steps_digest"] for cursor in one.cursors] == digests
        seen = [{k: c[k] for k in expected_cursors[0]} for c in one.cursors]
        assert seen == expected_cursors
        assert len({cursor["source_id"] for cursor in one.cursors}) == 1
        for cursor in one.cursors:
            # Of the batch at work or the last one, and of those that samples are carried from.
            work = min(cursor["batch_id"] - (not cursor["step_index"]), len(BATCHES) - 1)
            assert {work, *(b for b, _ in cursor["carried"])} <= set(cursor["stamps"])


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


@pytest.mark.parametrize(
    ("leftover", "done", "layout"),
    [
        # The checkpoint lies inside a batch whose plan has carried rollouts, on both ranks.
        ("carry", 3, Layout(dp=2)),
        # After a batch that leaves rollouts to carry.
        pytest.param("carry", 2, Layout(), marks=pytest.mark.slow),
        pytest.param("partial", 2, Layout(), marks=pytest.mark.slow),
        pytest.param("even", 2, Layout(), marks=pytest.mark.slow),
        pytest.param("drop", 2, Layout(), marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_resumed_training_goes_on_at_the_next_rollout(
    leftover: str,
    done: int,
    layout: Layout,
    batches: list[list[Example]],
    path: Path,
    tmp_path: Path,
) -> None:
    reference = expected(batches, leftover)
    # One rank writes this format by itself, in a fraction of the time.
    kept = {"ckpt_format": "torch"} if leftover == "carry" and layout.ranks > 1 else {}
    save = {"save": tmp_path, "save_interval": 100, "exit_interval": done, **kept}
    first = run(path, layout, leftover, **save)
    assert_equal(first, reference[:done])
    assert_cursors(first, batches, leftover, slice(0, done))
    second = run(path, layout, leftover, load=tmp_path, **kept)
    assert_cursors(second, batches, leftover, slice(done, None))
    assert second[0].rows[0]["iteration"] == done + 1
    assert_equal(second, reference[done:])


@pytest.mark.slow
def test_saved_under_one_layout_and_resumed_under_another(
    batches: list[list[Example]], path: Path, tmp_path: Path
) -> None:
    reference = expected(batches, "partial")
    save = {"save": tmp_path, "save_interval": 100, "exit_interval": 4}
    first = run(path, Layout(dp=2), "partial", **save)
    assert_equal(first, reference[:4])
    assert_cursors(first, batches, "partial", slice(0, 4))
    second = run(path, Layout(pp=2), "partial", load=tmp_path)
    assert_equal(second, reference[4:])
    assert_cursors(second, batches, "partial", slice(4, None))


@pytest.mark.slow
def test_options_that_form_steps_must_not_change_inside_a_batch(path: Path, tmp_path: Path) -> None:
    run(path, Layout(), "partial", save=tmp_path, save_interval=100, exit_interval=1)
    with pytest.raises(AssertionError, match="planned with leftover='partial', but now"):
        run(path, Layout(), "even", load=tmp_path)

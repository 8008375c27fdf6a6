"""How long LR schedules are, in rollouts; a warning when the run will be longer or shorter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.hooks.horizon import HorizonWarning
from megatron_dynbatch.hooks.options import UNBOUNDED
from megatron_dynbatch.rollouts import RolloutQueue, Sample
from megatron_dynbatch.steps import Cursor
from tests.hooks.helpers import training_options
from tests.parity.job import OWN_SCRIPT, Cell, run_cell
from tests.parity.reference import Recipe
from tests.parity.rollouts import CAPACITY, make_steps, write_batches

SIZES = (5, 3, 7)


def queue(*sizes: int, finished: bool = True) -> RolloutQueue:
    rollouts = RolloutQueue("rollouts")
    for size in sizes:
        # One sample and two in turns: a schedule counts rollouts.
        fan_out = [n for n in range(size) for _ in range(1 + n % 2)]
        rollouts.write([Sample([1, 2], 1, rollout_id=n) for n in fan_out])
    if finished:
        rollouts.finish()
    return rollouts


def warnings_of(
    source: RolloutQueue, cursors: list[tuple[int, Cursor]], *, end: bool = False, **flags: Any
) -> list[str]:
    """What is said at these (iteration, cursor), and at the end."""
    values = {"global_batch_size": 5, "lr_decay_style": "cosine"}
    said: list[str] = []
    warning = HorizonWarning(training_options(**{**values, **flags}), source, said.append)
    for iteration, cursor in cursors:
        warning.at_boundary(iteration, cursor)
    if end:
        warning.at_end(cursors[-1][1])
    return said


START = [(0, Cursor())]


@pytest.mark.parametrize(
    ("sizes", "flags", "expected"),
    [
        # Of 200 rollouts 1 % is 2.
        ((100, 100), {"train_samples": 198, "lr_decay_samples": 200}, None),
        ((100, 100), {"train_samples": 197, "lr_decay_samples": 200}, 197),
        ((100, 100), {"train_samples": 1000, "lr_decay_samples": 200}, None),
        ((100, 100), {"train_samples": 1000, "lr_decay_samples": 1000}, 200),
        ((100, 100), {"train_samples": UNBOUNDED, "lr_decay_samples": 150}, 200),
        ((100, 100), {"train_samples": UNBOUNDED, "lr_decay_samples": 200}, None),
        ((100,), {"train_samples": 50, "lr_decay_samples": 99, "lr_decay_style": "constant"}, None),
    ],
)
def test_what_is_expected_at_the_start(
    sizes: tuple[int, ...], flags: dict[str, Any], expected: int | None
) -> None:
    said = warnings_of(queue(*sizes), START, **flags)
    if expected is None:
        assert said == []
    else:
        horizon = flags["lr_decay_samples"]
        (line,) = said
        assert f"schedule is {horizon:,} rollouts long, but {expected} will be trained" in line


def test_an_open_run_is_judged_at_its_end() -> None:
    flags = {"train_samples": UNBOUNDED, "lr_decay_samples": 100}
    source = queue(10, finished=False)
    assert warnings_of(source, START, **flags) == []
    end = [*START, (9, Cursor(batch_id=1, consumed_rollouts=102))]
    (line,) = warnings_of(source, end, end=True, **flags)
    assert "100 rollouts long, but 102 were trained" in line
    end[-1] = (9, Cursor(batch_id=1, consumed_rollouts=101))
    assert warnings_of(source, end, end=True, **flags) == []


def test_iterations_are_judged_by_the_steps_so_far() -> None:
    """10 steps of at most 5 rollouts; partial steps make them 4 on average."""
    flags = {"train_iters": 10, "lr_decay_iters": 10}
    boundaries = [*START, (3, Cursor(batch_id=1, consumed_rollouts=12))]
    (line,) = warnings_of(queue(12, 12), boundaries, **flags)
    assert "50 rollouts long, but 40 will be trained if steps stay as they are" in line
    boundaries[-1] = (3, Cursor(batch_id=1, consumed_rollouts=15))
    assert warnings_of(queue(15), boundaries, **flags) == []


def test_schedules_where_the_total_is_not_known(tmp_path: Path) -> None:
    """END ends the run; LR warms up over 4 rollouts, then decays to 0 at 20."""
    write_batches(tmp_path, make_steps(SIZES))
    flags = {
        "dynamic-global-batch": True,
        "rollout-path": tmp_path,
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": CAPACITY,
    }
    recipe = Recipe(decay=20, warmup=4, clip_grad=0.0)
    (observed,) = run_cell(Cell(1, flags, recipe, script=OWN_SCRIPT))
    before = [0, 5, 8]
    # From the definition: 0 at the start, then the linear decay after 5 and 8 of 20 rollouts.
    wanted = [recipe.learning_rate * (1 - max(0, n - 4) / 16) if n else 0.0 for n in before]
    assert observed.learning_rates == pytest.approx(wanted, rel=1e-12)
    assert [row["consumed"] for row in observed.rows] == [5, 8, 15]

"""Real Megatron under every layout trains like the independent loop, after every step.

Weights in float32 with a stock script at fixed width, then in float64, where every parameter's
gradient and value is compared as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.compare import deviations
from tests.parity.job import OWN_SCRIPT, Cell, run_cell
from tests.parity.layouts import FAST, REST, SLOW, Layout
from tests.parity.page import Found
from tests.parity.reference import Recipe, ReferenceStep
from tests.parity.rollouts import batch_flags

Reference = Callable[[Recipe], list[ReferenceStep]]
Record = Callable[[str, str, Found], None]

full = pytest.mark.skipif(os.environ.get("PARITY") != "full", reason="run by `make parity`")


def name_of(value: object) -> str:
    """A layout's name in a test's id."""
    return value.name if isinstance(value, Layout) else str(value)


@pytest.mark.parametrize("reduction", ["rollout", pytest.param("token", marks=full)])
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(dp=2), Layout(pp=2), Layout(pp=4), Layout(pp=2, vpp=2)],
    ids=name_of,
)
def test_a_stock_script_equals_the_independent_loop(
    layout: Layout, reduction: str, rollout_path: Path, reference: Reference, record: Record
) -> None:
    recipe = Recipe(reduction=reduction)
    flags = {**batch_flags(rollout_path), "loss-reduction": reduction, **layout.flags()}
    found = deviations(
        run_cell(Cell(layout.ranks, flags, recipe)), reference(recipe), tensors=False
    )
    record("float32", f"{layout.name}, {reduction}", found)
    assert found["metrics"] < 1e-5
    assert found["grad norm"] < 1e-5
    assert found["learning rate"] < 1e-12
    assert found["consumed"] == 0


@pytest.mark.parametrize(
    "layout",
    [
        *FAST,
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW),
        *(pytest.param(layout, marks=full) for layout in REST),
    ],
    ids=name_of,
)
def test_float64_gradients_equal_those_of_the_independent_loop(
    layout: Layout, rollout_path: Path, reference: Reference, record: Record
) -> None:
    # Megatron clips float32 gradients only.
    recipe = Recipe(clip_grad=0.0, epsilon=1e-8)
    flags = {
        **batch_flags(rollout_path),
        "micro-batch-width": "variable",
        **layout.flags(),
    }
    cell = Cell(layout.ranks, flags, recipe, script=OWN_SCRIPT)
    found = deviations(run_cell(cell), reference(recipe))
    record("float64", layout.name, found)
    assert found["gradients"] < 1e-9
    assert found["parameters"] < 1e-9
    assert found["metrics"] < 1e-9
    assert found["learning rate"] < 1e-12
    assert found["consumed"] == 0

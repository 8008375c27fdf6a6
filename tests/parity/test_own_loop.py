"""One's own loop with the plain functions equals the independent loop as the hooks do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import own_loop
from tests.parity.compare import deviations
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe
from tests.parity.rollouts import SHORT_SIZES
from tests.parity.test_layouts import Record, Reference, name_of
from tests.pool import run_ranks


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(pp=2), pytest.param(Layout(tp=2, cp=2), marks=pytest.mark.slow)],
    ids=name_of,
)
def test_an_own_loop_equals_the_independent_loop(
    layout: Layout, short_path: Path, short_reference: Reference, record: Record
) -> None:
    recipe = Recipe(
        decay=30, warmup=5, clip_grad=0.0, epsilon=1e-8, weight_decay=0.05, end_weight_decay=0.2
    )
    observed = run_ranks(layout.ranks, own_loop.train, short_path, layout, recipe, sum(SHORT_SIZES))
    found = deviations(observed, short_reference(recipe))
    record("own loop", layout.name, found)
    assert max(found["gradients"], found["parameters"], found["metrics"]) < 1e-9
    assert max(found["learning rate"], found["weight decay"], found["consumed"]) < 1e-12

"""Options that must not matter, or matter in a known way, in all pairs with one another."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parity.compare import deviations
from tests.parity.covering import pairwise
from tests.parity.job import OWN_SCRIPT, Cell, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe
from tests.parity.rollouts import SHORT_SIZES, batch_flags
from tests.parity.splits import SPLITS, split_by
from tests.parity.test_layouts import Record, Reference

FACTORS = {
    "layout": (Layout(dp=2), Layout(pp=2), Layout(cp=2), Layout(tp=2), Layout(pp=2, vpp=2)),
    "split": SPLITS,
    "reduction": ("rollout", "sample", "token", "group", "constant"),
    "per_token": (False, True),
    "distributed": (False, True),
    "overlap": (False, True),
    "head": ("logits", "megatron", "stock"),
    "width": ("fixed", "variable"),
    "empty": ("count", "skip"),
}
CELLS = pairwise(FACTORS)
# The first cells of the greedy choice have the most new pairs.
NUM_FAST = 10


def name_of(choice: dict[str, Any]) -> str:
    """The factors that are not at their first value."""
    names = [choice["layout"].name, choice["split"], choice["reduction"], choice["head"]]
    names += [factor for factor in ("per_token", "distributed", "overlap") if choice[factor]]
    return "-".join([*names, choice["width"], choice["empty"]])


def cell_of(choice: dict[str, Any], path: Path) -> Cell:
    """The training that a choice asks for."""
    distributed = choice["distributed"]
    layout: Layout = choice["layout"]
    recipe = recipe_of(choice)
    flags = {
        **batch_flags(path, SHORT_SIZES),
        **layout.flags(),
        "loss-reduction": choice["reduction"],
        "loss-constant": recipe.loss_constant if choice["reduction"] == "constant" else None,
        "empty-rollouts": choice["empty"],
        "calculate-per-token-loss": choice["per_token"],
        "use-distributed-optimizer": distributed,
        "overlap-grad-reduce": choice["overlap"],
        "overlap-param-gather": choice["overlap"] and distributed,
        "micro-batch-width": choice["width"],
        "loss-head": choice["head"],
        "precision": "float32" if distributed else "float64",
    }
    prepare = partial(split_by, choice["split"])
    return Cell(layout.ranks, flags, recipe, script=OWN_SCRIPT, prepare=prepare)


def recipe_of(choice: dict[str, Any]) -> Recipe:
    """Warm-up, a weight decay that grows, and clipping where Megatron can clip."""
    return Recipe(
        reduction=choice["reduction"],
        loss_constant=9.0,
        empty_rollouts=choice["empty"],
        warmup=5,
        decay=30,
        weight_decay=0.05,
        end_weight_decay=0.2,
        clip_grad=1.0 if choice["distributed"] else 0.0,
        epsilon=1e-4 if choice["distributed"] else 1e-8,
    )


def bar_of(choice: dict[str, Any]) -> float:
    """Largest relative deviation allowed: float32 training, float32 loss head, or float64."""
    if choice["distributed"]:
        return 1e-5
    return 1e-9 if choice["head"] == "logits" else 1e-6


def is_fast(choice: dict[str, Any]) -> bool:
    """The first cell with a distributed optimizer whose communication overlaps."""
    return choice is next(c for c in CELLS if c["distributed"] and c["overlap"])


@pytest.mark.parametrize(
    "choice",
    [c if is_fast(c) else pytest.param(c, marks=pytest.mark.slow) for c in CELLS],
    ids=name_of,
)
def test_every_pair_of_options_equals_the_independent_loop(
    choice: dict[str, Any],
    short_path: Path,
    short_reference: Reference,
    record: Record,
) -> None:
    if CELLS.index(choice) >= NUM_FAST and os.environ.get("PARITY") != "full":
        pytest.skip("run by `make parity`")
    steps = short_reference(recipe_of(choice))
    observed = run_cell(cell_of(choice, short_path))
    found = deviations(observed, steps)
    record("options", name_of(choice), found)
    bar = bar_of(choice)
    assert max(found["metrics"], found["parameters"]) < bar
    assert found["gradients"] < (1e-4 if choice["distributed"] else bar)
    assert found["learning rate"] < 1e-12
    assert found["weight decay"] < 1e-12
    assert found["consumed"] == 0

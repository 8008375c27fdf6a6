"""Real Megatron under every layout trains like the independent loop, after every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.compare import deviations
from tests.parity.job import Cell, run_cell
from tests.parity.reference import Recipe, ReferenceStep
from tests.parity.rollouts import CAPACITY, STEP_SIZES

Reference = Callable[[Recipe], list[ReferenceStep]]

LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "DP1": (1, {}),
    "DP2": (2, {}),
    "PP2": (2, {"pipeline-model-parallel-size": 2}),
    "PP4": (4, {"pipeline-model-parallel-size": 4}),
    "PP2xVPP2": (
        2,
        {"pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 2},
    ),
}


def batch_flags(path: Path) -> dict[str, object]:
    """The plugin's options when each rollout batch is one step."""
    return {
        "dynamic-global-batch": True,
        "rollout-path": path,
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": CAPACITY,
        "train-samples": sum(STEP_SIZES),
    }


@pytest.mark.parametrize("reduction", ["rollout", "token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_equals_the_independent_loop(
    layout: str, reduction: str, rollout_path: Path, reference: Reference
) -> None:
    ranks, flags = LAYOUTS[layout]
    recipe = Recipe(reduction=reduction)
    cell = Cell(ranks, {**batch_flags(rollout_path), "loss-reduction": reduction, **flags}, recipe)
    found = deviations(run_cell(cell), reference(recipe), tensors=False)
    assert found["loss"] < 1e-5
    assert found["grad norm"] < 1e-5
    assert found["learning rate"] < 1e-12
    assert found["consumed"] == 0

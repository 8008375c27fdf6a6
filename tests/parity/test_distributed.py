"""The distributed optimizer, its instances and its late gathering, against the independent loop.

Megatron's distributed optimizer takes no float64: float32 beside the loop's float64.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.architecture import Architecture
from tests.parity.compare import deviations
from tests.parity.job import OWN_SCRIPT, Cell, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, train
from tests.parity.reference_aux import Auxiliary
from tests.parity.rollouts import SHORT_SIZES, batch_flags, make_steps
from tests.parity.test_layouts import Record, full

slow = pytest.mark.slow

DENSE = Architecture()
EXPERTS = Architecture(experts=4)
# A forward pass that gathers has to do it bucket by bucket.
GATHERED = {"overlap-grad-reduce": True, "overlap-param-gather": True, "ddp-bucket-size": 4000}
INSTANCES = {"num-distributed-optimizer-instances": 2}

type Choice = tuple[str, Architecture, Layout, dict[str, object]]

CHOICES: tuple[Choice, ...] = (
    ("gathered", DENSE, Layout(dp=2), GATHERED),
    ("two instances", DENSE, Layout(dp=2), INSTANCES),
    ("two instances", DENSE, Layout(dp=4), INSTANCES),
    ("", DENSE, Layout(dp=4), {}),
    ("gathered", DENSE, Layout(dp=4), GATHERED),
    ("two instances, gathered", DENSE, Layout(dp=4), INSTANCES | GATHERED),
    ("two instances, gathered", DENSE, Layout(pp=2, vpp=2, dp=2), INSTANCES | GATHERED),
    ("two instances", DENSE, Layout(cp=2, dp=2), INSTANCES),
    ("gathered", DENSE, Layout(tp=2, dp=2, sequence_parallel=True), GATHERED),
    ("z-loss, gathered", EXPERTS, Layout(dp=2, ep=2), GATHERED),
    ("z-loss, two instances, gathered", EXPERTS, Layout(dp=4, ep=2), INSTANCES | GATHERED),
)
NUM_FAST, NUM_SLOW = 2, 1


def name_of(choice: Choice) -> str:
    what, _, layout, _ = choice
    return ", ".join(filter(None, [layout.name, what]))


def marked(number: int, choice: Choice) -> object:
    if number < NUM_FAST:
        return pytest.param(choice, id=name_of(choice))
    marks = slow if number < NUM_FAST + NUM_SLOW else full
    return pytest.param(choice, marks=marks, id=name_of(choice))


@pytest.mark.parametrize("choice", [marked(*pair) for pair in enumerate(CHOICES)])
def test_equals_the_independent_loop(choice: Choice, short_path: Path, record: Record) -> None:
    _, architecture, layout, options = choice
    auxiliary = Auxiliary(z_loss=0.1 if architecture.experts else 0.0)
    recipe = Recipe(decay=sum(SHORT_SIZES), auxiliary=auxiliary)
    flags = {
        **batch_flags(short_path, SHORT_SIZES),
        **layout.flags(),
        **options,
        "use-distributed-optimizer": True,
        "micro-batch-width": "variable",
        "precision": "float32",
    }
    observed = run_cell(Cell(layout.ranks, flags, recipe, architecture, script=OWN_SCRIPT))
    found = deviations(observed, train(make_steps(SHORT_SIZES), recipe, architecture))
    record("distributed", name_of(choice), found)
    assert max(found["metrics"], found["parameters"]) < 1e-5
    assert found["gradients"] < 1e-4
    assert max(found["learning rate"], found["weight decay"], found["consumed"]) < 1e-12

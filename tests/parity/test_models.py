"""Model families and single features: the first step against every sample alone, in float64."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.parity.alone import EMBEDDING, Alone, measure_alone, start_from_drawn_weights
from tests.parity.compare import tensor_deviation
from tests.parity.job import OWN_SCRIPT, Cell, assemble, run_cell
from tests.parity.layouts import Layout
from tests.parity.models import FAMILIES, FEATURES, Model
from tests.parity.reference import Recipe
from tests.parity.rollouts import CAPACITY, batch_flags, make_steps, write_batches
from tests.parity.test_layouts import Record, full

SIZES = (8,)
STEPS = make_steps(SIZES)
RECIPE = Recipe(decay=sum(SIZES), clip_grad=0.0, epsilon=1e-8)
MODELS = FAMILIES | FEATURES
CASES = [(name, layout) for name, model in MODELS.items() for layout in model.layouts]
# Of the families, which have most of the features.
FAST = [("DeepSeek-V3", FAMILIES["DeepSeek-V3"].layouts[0])]
SLOW = [("GPT-OSS", FAMILIES["GPT-OSS"].layouts[1]), ("Gemma 3", FAMILIES["Gemma 3"].layouts[0])]


def marked(case: tuple[str, Layout]) -> object:
    if case in FAST:
        return pytest.param(*case, id=f"{case[0]}, {case[1].name}")
    marks = pytest.mark.slow if case in SLOW else full
    return pytest.param(*case, marks=marks, id=f"{case[0]}, {case[1].name}")


@functools.cache
def alone(name: str) -> Alone:
    """The reference, without the plugin."""
    flags = {
        **MODELS[name].flags, "sft": True, "no-create-attention-mask-in-dataloader": True,
        "seq-length": CAPACITY, "micro-batch-size": 1, "global-batch-size": 1, "train-samples": 8,
        "loss-head": "stock",
    }  # fmt: skip
    # How it is run, not what it is.
    layout_only = {k: None for k in flags if "pipeline" in k or "recompute" in k}
    prepare = partial(measure_alone, STEPS[0], RECIPE, MODELS[name].weighted_by)
    cell = Cell(
        1, {**flags, **layout_only}, RECIPE, script=OWN_SCRIPT, plugin=False,
        overwrite_weights=False, prepare=prepare,
    )  # fmt: skip
    found: Alone = run_cell(cell)[0].notes[0]
    return found


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "rollouts"
    write_batches(path, STEPS)
    return path


@pytest.mark.parametrize("name, layout", [marked(case) for case in CASES])
def test_equals_every_sample_alone(
    name: str, layout: Layout, one_step: Path, record: Record
) -> None:
    model: Model = MODELS[name]
    flags = {
        **batch_flags(one_step, SIZES), **model.flags, **layout.flags(),
        "micro-batch-width": "variable",
        # A loss on logits and one on Megatron's own token losses take turns over the layouts.
        "loss-head": "logits" if layout == model.layouts[0] else "stock",
    }  # fmt: skip
    cell = Cell(
        layout.ranks, flags, RECIPE, script=OWN_SCRIPT, overwrite_weights=False,
        prepare=start_from_drawn_weights,
    )  # fmt: skip
    observed = run_cell(cell)
    loss, gradients = alone(name)
    whole = assemble([one.gradients[0] for one in observed])
    if "output_layer.weight" not in gradients:  # the last stage has a copy of the embedding
        copy = whole.pop("output_layer.weight", whole[EMBEDDING])
        assert torch.equal(copy, whole[EMBEDDING])
    found = {
        "loss": abs(observed[-1].rows[0]["lm loss"] / loss - 1),
        "gradients": tensor_deviation(whole, gradients),
    }
    record("families" if name in FAMILIES else "features", f"{name}, {layout.name}", found)
    assert max(found.values()) < 1e-9

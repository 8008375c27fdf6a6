"""Load balancing over the step where steps are recomputed, skipped, and resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.parity.compare import deviations
from tests.parity.float64 import keep_float64
from tests.parity.job import OWN_SCRIPT, Cell, run_cell
from tests.parity.layouts import Layout
from tests.parity.page import Found
from tests.parity.reference import train
from tests.parity.rollouts import SHORT_SIZES, batch_flags, make_steps
from tests.parity.test_experts import EXPERTS, recipe_of
from tests.parity.test_layouts import Record

pytestmark = pytest.mark.slow

RECIPE = recipe_of("balance of the previous step")
STEPS = make_steps(SHORT_SIZES)


def cell(path: Path, **flags: object) -> Cell:
    options = {
        **batch_flags(path, SHORT_SIZES),
        **Layout().flags(),
        "micro-batch-width": "variable",
        **{name.replace("_", "-"): value for name, value in flags.items()},
    }
    return Cell(1, options, RECIPE, EXPERTS, script=OWN_SCRIPT, prepare=keep_float64)


def assert_exact(found: Found) -> None:
    assert max(float(found[q]) for q in ("gradients", "parameters", "metrics")) < 1e-9


def test_tokens_are_counted_once_where_layers_are_recomputed(
    short_path: Path, record: Record
) -> None:
    recomputed = {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    }  # fmt: skip
    found = deviations(run_cell(cell(short_path, **recomputed)), train(STEPS, RECIPE, EXPERTS))
    record("experts", "balance of the previous step, activations recomputed, DP1", found)
    assert_exact(found)


def test_a_skipped_step_leaves_the_frequencies(short_path: Path, record: Record) -> None:
    observed = run_cell(cell(short_path, iterations_to_skip=2))
    kept = train([STEPS[0], STEPS[2]], RECIPE, EXPERTS)
    # The skipped step is counted as consumed, one rollout.
    kept[1] = dataclasses.replace(kept[1], consumed=kept[1].consumed + SHORT_SIZES[1])
    found = deviations(observed, kept)
    record("experts", "balance of the previous step, a step skipped between, DP1", found)
    assert_exact(found)


def test_a_checkpoint_keeps_the_frequencies(
    short_path: Path, tmp_path: Path, record: Record
) -> None:
    reference = train(STEPS, RECIPE, EXPERTS)
    kept = {"save": tmp_path, "save_interval": 2, "exit_interval": 2, "ckpt_format": "torch"}
    first = run_cell(cell(short_path, **kept))
    assert_exact(deviations(first, reference[:2]))
    again = dataclasses.replace(
        cell(short_path, load=tmp_path, ckpt_format="torch"), overwrite_weights=False
    )
    found = deviations(run_cell(again), reference[2:])
    record("experts", "balance of the previous step, resumed, DP1", found)
    assert_exact(found)

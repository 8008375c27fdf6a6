"""Megatron's other paths: recompute, skipping, replay, overflow, evaluation, a second training."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.compare import deviations
from tests.parity.job import NOTES, OWN_SCRIPT, Cell, Observed, run_cell, run_rank
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, train
from tests.parity.rollouts import SHORT_SIZES, batch_flags, make_steps
from tests.parity.test_layouts import Reference, name_of
from tests.pool import run_ranks

SHORT = Recipe(decay=sum(SHORT_SIZES))
EXACT = Recipe(decay=sum(SHORT_SIZES), clip_grad=0.0)


def exact_cell(path: Path, layout: Layout, **flags: object) -> Cell:
    """Three steps in float64; flags with underscores for hyphens."""
    options = {
        **batch_flags(path, SHORT_SIZES),
        **layout.flags(),
        **{name.replace("_", "-"): value for name, value in flags.items()},
    }
    return Cell(layout.ranks, options, EXACT, script=OWN_SCRIPT)


def assert_exact(observed: list[Observed], reference: Reference) -> None:
    found = deviations(observed, reference(EXACT))
    assert max(found["gradients"], found["parameters"], found["metrics"]) < 1e-9
    assert max(found["learning rate"], found["consumed"]) < 1e-12


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, cp=2)], ids=name_of)
def test_recomputed_activations(
    layout: Layout, short_path: Path, short_reference: Reference
) -> None:
    cell = exact_cell(
        short_path,
        layout,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert_exact(run_cell(cell), short_reference)


@pytest.mark.parametrize("width", [48, 128, 256])
def test_padding_changes_nothing(width: int, short_path: Path, short_reference: Reference) -> None:
    # The step with one sample has a dummy of this width.
    cell = exact_cell(short_path, Layout(dp=2), max_tokens_per_gpu=width)
    assert_exact(run_cell(cell), short_reference)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2), Layout(cp=2)], ids=name_of)
def test_every_metric_of_a_policy_loss(
    layout: Layout, short_path: Path, short_reference: Reference
) -> None:
    recipe = dataclasses.replace(EXACT, objective="clip")
    cell = exact_cell(short_path, layout, loss_head="policy", micro_batch_width="variable")
    found = deviations(run_cell(cell), short_reference(recipe))
    assert max(found["gradients"], found["parameters"], found["metrics"]) < 1e-9


def test_oversize_samples_run_alone(short_path: Path, short_reference: Reference) -> None:
    cell = exact_cell(
        short_path,
        Layout(dp=2),
        max_tokens_per_gpu=24,
        oversize="alone",
        micro_batch_width="variable",
    )
    assert_exact(run_cell(cell), short_reference)


def test_a_skipped_iteration_consumes_its_rollouts_and_trains_nothing(rollout_path: Path) -> None:
    steps = make_steps()
    reference = train([steps[0], *steps[2:]], Recipe())
    flags = {**batch_flags(rollout_path), "iterations-to-skip": 2}
    rows = run_cell(Cell(1, flags))[0].rows
    assert [row["iteration"] for row in rows] == [1, 3, 4, 5, 6]
    assert [row["consumed"] for row in rows] == [8, 25, 28, 37, 45]
    for row, step in zip(rows, reference, strict=True):
        assert row["lm loss"] == pytest.approx(step.metrics["lm loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(step.grad_norm, rel=1e-5)
        assert row["learning_rate"] == pytest.approx(step.learning_rate, abs=1e-15)


def fail_once() -> None:
    """The second loss that is validated looks like NaN, the first time only."""
    from megatron.core.rerun_state_machine import RerunStateMachine

    validate, calls = RerunStateMachine.validate_result, iter(range(10**6))

    @functools.wraps(validate)
    def validate_result(self: Any, result: Any, *positional: Any, **named: Any) -> Any:
        if next(calls) == 1:
            NOTES.append("failed")
            result = torch.full_like(result, math.nan)
        return validate(self, result, *positional, **named)

    RerunStateMachine.validate_result = validate_result


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, vpp=2)], ids=name_of)
def test_a_step_replayed_in_place_trains_once(
    layout: Layout, short_path: Path, short_reference: Reference
) -> None:
    flags = {**batch_flags(short_path, SHORT_SIZES), **layout.flags()}
    observed = run_cell(Cell(layout.ranks, flags, SHORT, prepare=fail_once))
    assert observed[-1].notes == ["failed"]
    found = deviations(observed, short_reference(SHORT), tensors=False)
    assert max(found["metrics"], found["grad norm"]) < 1e-5
    assert max(found["learning rate"], found["consumed"]) < 1e-12


def test_an_overflowed_step_counts_its_rollouts_but_moves_no_schedule(short_path: Path) -> None:
    flags = {
        **batch_flags(short_path, SHORT_SIZES),
        **Layout(dp=2).flags(),
        "fp16": True,
        "initial-loss-scale": 2.0**28,
        "hysteresis": 1,
        "loss-scale-window": 1000,
    }
    observed = run_cell(Cell(2, flags, SHORT))
    rows = observed[-1].rows
    assert [row["consumed"] for row in rows] == [8, 9, 21]
    finite = [math.isfinite(row["grad_norm"]) for row in rows]
    assert not finite[0], "the first step must overflow for this test to mean anything"
    trained = 0
    for size, is_finite, row in zip(SHORT_SIZES, finite, rows, strict=True):
        trained += size if is_finite else 0
        assert row["learning_rate"] == pytest.approx(SHORT.learning_rate_at(trained))


def note_evaluations() -> None:
    """Keep what Megatron's evaluation returns."""
    from megatron.training import training

    evaluate = training.evaluate

    @functools.wraps(evaluate)
    def evaluate_and_note(*positional: Any, **named: Any) -> Any:
        answer = evaluate(*positional, **named)
        NOTES.append({name: float(value) for name, value in answer[0].items()})
        return answer

    training.evaluate = evaluate_and_note


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=name_of)
def test_evaluation_is_what_it_is_without_the_plugin(layout: Layout, short_path: Path) -> None:
    # With a vanishing learning rate both evaluate the initial weights.
    recipe = Recipe(learning_rate=1e-30, decay=100)
    evaluation = {"eval-iters": 2, "eval-interval": 1, "eval-global-batch-size": 4}
    with_plugin = {
        **batch_flags(short_path, SHORT_SIZES),
        **layout.flags(),
        "rollouts-per-step": 4,
        "train-samples": 4,
    }
    without = {
        **layout.flags(),
        "max-tokens-per-gpu": None,
        "sft": True,
        "no-create-attention-mask-in-dataloader": True,
        "seq-length": 64,
        "micro-batch-size": 1,
        "global-batch-size": 4,
        "train-samples": 4,
    }
    ours, stock = (
        run_cell(
            Cell(
                layout.ranks,
                {**flags, **evaluation},
                recipe,
                plugin=flags is with_plugin,
                prepare=note_evaluations,
            )
        )[-1].notes
        for flags in (with_plugin, without)
    )
    assert ours[0] == stock[0] and ours[0]["lm loss"] > 1


def run_twice(cell: Cell) -> tuple[Observed, Observed]:
    """Two whole trainings in one process."""
    from megatron.training import training

    from megatron_dynbatch.cpu import reset_megatron

    originals = training.train, training.training_log
    first = run_rank(cell)
    reset_megatron()
    training.train, training.training_log = originals
    return first, run_rank(cell)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=name_of)
def test_a_second_training_in_one_process_is_like_the_first(
    layout: Layout, short_path: Path, short_reference: Reference
) -> None:
    cell = exact_cell(short_path, layout)
    pairs = run_ranks(layout.ranks, run_twice, cell)
    for number in (0, 1):
        assert_exact([pair[number] for pair in pairs], short_reference)

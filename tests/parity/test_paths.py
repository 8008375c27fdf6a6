"""Megatron's other paths: recompute, skipping, replay, overflow, evaluation, a second training."""

from __future__ import annotations

import dataclasses
import functools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parity.compare import deviations
from tests.parity.job import NOTES, OWN_SCRIPT, Cell, Observed, run_cell, run_rank
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, train
from tests.parity.rollouts import SHORT_SIZES, batch_flags, make_steps
from tests.parity.test_layouts import Record, Reference, name_of
from tests.pool import run_ranks

slow = pytest.mark.slow

SHORT = Recipe(decay=sum(SHORT_SIZES))
EXACT = Recipe(decay=sum(SHORT_SIZES), clip_grad=0.0, epsilon=1e-8)


def exact_cell(path: Path, layout: Layout, **flags: object) -> Cell:
    """Three steps in float64; flags with underscores for hyphens."""
    options = {
        **batch_flags(path, SHORT_SIZES),
        **layout.flags(),
        **{name.replace("_", "-"): value for name, value in flags.items()},
    }
    return Cell(layout.ranks, options, EXACT, script=OWN_SCRIPT)


def assert_exact(
    observed: list[Observed], reference: Reference, record: Record, row: str, recipe: Recipe = EXACT
) -> None:
    """Within 1e-9 of the independent loop, in every quantity."""
    found = deviations(observed, reference(recipe))
    record("paths", row, found)
    assert max(found["gradients"], found["parameters"], found["metrics"]) < 1e-9
    assert max(found["learning rate"], found["consumed"]) < 1e-12


@pytest.mark.parametrize(
    "layout", [Layout(pp=2), pytest.param(Layout(tp=2, cp=2), marks=slow)], ids=name_of
)
def test_recomputed_activations(
    layout: Layout, short_path: Path, short_reference: Reference, record: Record
) -> None:
    cell = exact_cell(
        short_path,
        layout,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    row = f"activations recomputed, {layout.name}"
    assert_exact(run_cell(cell), short_reference, record, row)


@pytest.mark.parametrize(
    "width", [48, pytest.param(128, marks=slow), pytest.param(256, marks=slow)]
)
def test_padding_changes_nothing(
    width: int, short_path: Path, short_reference: Reference, record: Record
) -> None:
    # The step with one sample has a dummy of this width.
    cell = exact_cell(short_path, Layout(dp=2), max_tokens_per_gpu=width)
    row = f"fixed width {width}, DP2"
    assert_exact(run_cell(cell), short_reference, record, row)


@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), *(pytest.param(x, marks=slow) for x in (Layout(tp=2), Layout(cp=2)))],
    ids=name_of,
)
def test_every_metric_of_a_policy_loss(
    layout: Layout, short_path: Path, short_reference: Reference, record: Record
) -> None:
    recipe = dataclasses.replace(EXACT, objective="clip")
    cell = exact_cell(short_path, layout, loss_head="policy", micro_batch_width="variable")
    row = f"policy loss with all its metrics, {layout.name}"
    assert_exact(run_cell(cell), short_reference, record, row, recipe)


def test_oversize_samples_run_alone(
    short_path: Path, short_reference: Reference, record: Record
) -> None:
    cell = exact_cell(
        short_path,
        Layout(dp=2),
        max_tokens_per_gpu=24,
        oversize="alone",
        micro_batch_width="variable",
    )
    row = "samples longer than the cap, alone, DP2"
    assert_exact(run_cell(cell), short_reference, record, row)


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


def reject_a_loss(fatal: bool) -> None:
    """Make Megatron doubt one loss of the second iteration; notes what its rerun machine does.

    The first iteration is never validated. The machine finds the same loss again; it goes on if
    that is not `fatal`, else it wants another machine to try from a checkpoint.
    """
    from megatron.core.rerun_state_machine import RerunState, RerunStateMachine

    validate = RerunStateMachine.validate_result

    def validate_result(
        self: Any, result: Any, rejection_func: Any, *positional: Any, **named: Any
    ) -> Any:
        if self.state.name not in NOTES:
            NOTES.append(self.state.name)
        is_fresh = NOTES[0] == "INITIAL_RUN"
        if is_fresh and self.current_iteration == 2 and self.state == RerunState.INITIAL_RUN:
            rejection_func = bool  # any loss but 0
        if self.state == RerunState.RERUNNING_FROM_CHECKPOINT:
            self.suspicious_node = "elsewhere"
        return validate(self, result, rejection_func, *positional, **{**named, "fatal": fatal})

    RerunStateMachine.validate_result = validate_result


@pytest.mark.parametrize(
    "layout", [Layout(dp=2), pytest.param(Layout(pp=2, vpp=2), marks=slow)], ids=name_of
)
def test_a_step_replayed_in_place_trains_once(
    layout: Layout, short_path: Path, short_reference: Reference
) -> None:
    flags = {**batch_flags(short_path, SHORT_SIZES), **layout.flags()}
    observed = run_cell(Cell(layout.ranks, flags, SHORT, prepare=partial(reject_a_loss, False)))
    assert observed[-1].notes == ["INITIAL_RUN", "RERUNNING_IN_PLACE"]
    found = deviations(observed, short_reference(SHORT), tensors=False)
    assert max(found["metrics"], found["grad norm"]) < 1e-5
    assert max(found["learning rate"], found["consumed"]) < 1e-12


@slow
def test_a_step_run_again_from_a_checkpoint_trains_once(
    short_path: Path, tmp_path: Path, short_reference: Reference
) -> None:
    flags = {**batch_flags(short_path, SHORT_SIZES), **Layout(dp=2).flags()}
    save = {"save": tmp_path, "save-interval": 100}
    doubt, trust = partial(reject_a_loss, True), partial(reject_a_loss, False)
    first = run_cell(Cell(2, {**flags, **save}, SHORT, prepare=doubt, exit_code=16))
    load = {"load": tmp_path}
    second = run_cell(Cell(2, {**flags, **load}, SHORT, prepare=trust, overwrite_weights=False))
    assert second[-1].notes[0] == "RERUNNING_FROM_CHECKPOINT"
    for observed, steps in ((first, slice(0, 1)), (second, slice(1, None))):
        found = deviations(observed, short_reference(SHORT)[steps], tensors=False)
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


@pytest.mark.parametrize(
    "layout", [Layout(dp=2), pytest.param(Layout(pp=2), marks=slow)], ids=name_of
)
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
    from megatron_dynbatch.cpu import reset_megatron

    first = run_rank(cell)
    reset_megatron()
    return first, run_rank(cell)


@pytest.mark.parametrize(
    "layout", [Layout(dp=2), pytest.param(Layout(pp=2), marks=slow)], ids=name_of
)
def test_a_second_training_in_one_process_is_like_the_first(
    layout: Layout, short_path: Path, short_reference: Reference, record: Record
) -> None:
    cell = exact_cell(short_path, layout)
    pairs = run_ranks(layout.ranks, run_twice, cell)
    for number in (0, 1):
        row = f"training {number + 1} in one process, {layout.name}"
        assert_exact([pair[number] for pair in pairs], short_reference, record, row)

"""One run after another in a process, its counters, and the cursor of a checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.hooks import step_boundary
from megatron_dynbatch.hooks.calculator import StepCalculator, building_calculator
from megatron_dynbatch.hooks.checkpoint import loaded_samples
from megatron_dynbatch.hooks.registry import check_in_place
from megatron_dynbatch.hooks.session import Session, current, end_session, session, start_session
from megatron_dynbatch.hooks.step_boundary import advance_lr, change_count, finish_step
from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.rollouts import Sample, SampleIndex
from megatron_dynbatch.steps import Cursor, Step
from tests.hooks.helpers import arguments
from tests.pool import run_ranks
from tests.reliability.catalogue import shown


@pytest.fixture
def run() -> Iterator[Session]:
    """A run of this process."""
    yield start_session(arguments())
    end_session()


def open_step(run: Session) -> Step:
    """Two rollouts of five samples: three micro-batches."""
    samples = [Sample(np.ones(24, np.int64), 8, rollout_id=r) for r in (0, 0, 0, 1, 1)]
    index = SampleIndex.from_samples(samples)
    plan = make_plan(index, ParallelLayout(), PlanOptions(max_tokens_per_gpu=64))
    run.step = Step(
        plan, 0, 0, dp_rank=0, cp_rank=0, samples=dict(enumerate(samples)), width=None, device="cpu"
    )
    return run.step


def test_rates_advance_by_rollouts_and_not_by_samples_or_micro_batches(run: Session) -> None:
    assert advance_lr(40, {}) == 40  # no step is open
    open_step(run)
    assert advance_lr(40, {}) == 2
    end_session()
    assert advance_lr(40, {}) == 40


def test_the_calculator_answers_from_the_open_step(run: Session) -> None:
    calculator = StepCalculator(run)
    sizes = calculator.get_current_global_batch_size, calculator.get_micro_batch_size
    assert (calculator.get(), *(size() for size in sizes)) == (1, 8, 1)
    open_step(run)
    calculator.update(100, True)
    assert (calculator.get(), *(size() for size in sizes)) == (3, 2, 1)
    assert calculator.get_current_running_global_batch_size() == 2


def test_without_a_run_every_hook_hands_back_what_megatron_has() -> None:
    assert session() is None
    for stock in (True, False):
        assert step_boundary.open_step(stock, {}) is stock
        assert change_count(stock, {}) is stock
    assert finish_step(12, {}) == 12
    assert loaded_samples(12, {}) == 12


def test_a_run_hides_changes_of_the_count_and_finishes_open_steps_only(run: Session) -> None:
    assert change_count(True, {}) is False
    assert finish_step(12, {}) == 12


def test_the_micro_batch_in_force_is_the_selected_one(run: Session) -> None:
    with pytest.raises(RuntimeError, match="only inside a training step"):
        current()
    step = open_step(run)
    run.select(1)
    assert current() is step.micro_batch(1) and run.current_index == 1


def two_trainings(first: argparse.Namespace, second: argparse.Namespace) -> list[object]:
    """What Megatron's calculator is after each, and whether a run is left."""
    from megatron.training import global_vars

    build = building_calculator(lambda *positional: "Megatron's own", check_in_place)
    run = start_session(first)
    open_step(run)
    global_vars._GLOBAL_ARGS = second
    return [build(), session() is None, advance_lr(40, {})]


def test_a_second_training_without_the_flag_meets_no_run() -> None:
    off = arguments(dynamic_global_batch=False)
    (found,) = run_ranks(1, two_trainings, arguments(), off, process_group=False)
    assert found == ["Megatron's own", True, 40]


def saved(**cursor: Any) -> argparse.Namespace:
    return argparse.Namespace(dynbatch_cursor=Cursor(**cursor).to_dict())


def test_a_run_that_loads_and_saves_without_a_step_keeps_its_cursor(run: Session) -> None:
    checkpoint = saved(batch_id=2, step_index=1, carried=((1, 4),), consumed_rollouts=9)
    assert loaded_samples(77, {"checkpoint_args": checkpoint}) == 9
    # Megatron saves its arguments with every checkpoint.
    assert run.args.dynbatch_cursor == checkpoint.dynbatch_cursor
    again = Cursor.from_dict(run.args.dynbatch_cursor)
    assert again == Cursor(2, 1, ((1, 4),), consumed_rollouts=9)


def test_a_checkpoint_without_cursor_is_taken_at_its_beginning_only(run: Session) -> None:
    stock = argparse.Namespace()
    assert loaded_samples(0, {"checkpoint_args": stock}) == 0
    with pytest.raises(ResumeError) as raised:
        loaded_samples(12, {"checkpoint_args": stock})
    assert "counts 12 consumed samples" in str(raised.value)
    shown("the checkpoint counts", str(raised.value))

"""Steps opened and finished as Megatron asks, over rollouts that a real feed reads."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dynbatch.errors import OptionError, ResumeError
from megatron_dynbatch.hooks.calculator import StepCalculator, building_calculator
from megatron_dynbatch.hooks.options import UNBOUNDED
from megatron_dynbatch.hooks.registry import check_in_place
from megatron_dynbatch.hooks.session import Session, end_session, start_session
from megatron_dynbatch.hooks.sites import SiteError
from megatron_dynbatch.hooks.step_boundary import finish_step, open_step
from megatron_dynbatch.plan import ParallelLayout
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps import StepFeed
from tests.cpu.training import train as train_stock
from tests.hooks.helpers import arguments
from tests.pool import run_ranks


@pytest.fixture
def source(tmp_path: Path) -> RolloutDirectory:
    return RolloutDirectory(tmp_path / "rollouts")


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    yield
    end_session()


def write(source: RolloutDirectory, trained: list[bool]) -> None:
    """A batch of rollouts, two samples each."""
    source.write(
        [
            Sample(np.ones(3, np.int64), loss_mask=[int(is_trained)] * 2, rollout_id=number)
            for number, is_trained in enumerate(trained)
            for _ in range(2)
        ]
    )


def begin(source: RolloutDirectory, **changed: Any) -> Session:
    """A run with two rollouts in a step."""
    values: dict[str, Any] = {
        "rollouts_per_step": 2, "consumed_train_samples": 0,
    }  # fmt: skip
    run = start_session(arguments(**{**values, **changed}))
    run._feed = StepFeed(source, ParallelLayout(), run.options.plan, batch_timeout=0.3)
    return run


def train(run: Session, iterations: int = 100) -> list[int]:
    """Rollouts of each step, as `train` of Megatron goes through them."""
    args, sizes = run.args, []
    while open_step(len(sizes) < iterations, {"iteration": len(sizes), "model": []}):
        assert run.step is not None
        sizes.append(run.step.step_global_batch_size)
        size = finish_step(99, {})
        args.consumed_train_samples += size
        assert args.dynbatch_cursor == run.feed.cursor.to_dict()
        assert size == sizes[-1]
    assert run.step is None
    return sizes


def test_rollouts_are_consumed_until_their_end(source: RolloutDirectory) -> None:
    for size in (3, 2):
        write(source, [True] * size)
    source.finish()
    run = begin(source)
    assert train(run) == [2, 1, 2]
    assert run.args.consumed_train_samples == 5
    assert run.args.dynbatch_cursor["batch_id"] == 2


def test_without_a_number_of_samples_megatrons_iterations_end_the_training(
    source: RolloutDirectory,
) -> None:
    write(source, [True] * 6)
    run = begin(source)
    assert train(run, iterations=2) == [2, 2]
    assert run.feed.cursor.step_index == 2  # the third step was not opened


@pytest.mark.parametrize("samples", [3, 4])
def test_a_number_of_samples_ends_the_training_and_iterations_do_not(
    source: RolloutDirectory, samples: int
) -> None:
    write(source, [True] * 4)  # no END: a third step would wait for it in vain
    run = begin(source, train_samples=samples)
    assert train(run, iterations=0) == [2, 2]


def test_rollouts_of_empty_steps_count_towards_the_number_of_samples(
    source: RolloutDirectory,
) -> None:
    write(source, [True, True, False, False, True, True])
    run = begin(source, train_samples=4)
    assert train(run) == [2]
    assert run.args.consumed_train_samples == 4


def test_megatrons_count_must_be_the_cursors(source: RolloutDirectory) -> None:
    write(source, [True] * 2)
    run = begin(source, consumed_train_samples=1)
    with pytest.raises(RuntimeError, match="Megatron counts 1 consumed rollouts, the cursor 0"):
        train(run)


def test_batches_that_are_gone_are_told_before_the_first_step(source: RolloutDirectory) -> None:
    for _ in range(2):
        write(source, [True] * 2)
    source.delete_before(1)
    with pytest.raises(ResumeError, match="training would go on at rollout batch 0 .* was deleted"):
        train(begin(source))


def test_the_length_of_the_schedule_is_looked_at_before_the_first_step(
    source: RolloutDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write(source, [True] * 4)
    source.finish()
    run = begin(source, lr_decay_style="linear", lr_decay_samples=9, train_samples=UNBOUNDED)
    assert train(run) == [2, 2]
    assert "the LR schedule is 9 rollouts long, but 4 will be trained;" in capsys.readouterr().out


def test_and_after_the_last_one(
    source: RolloutDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write(source, [True] * 2)  # what will be trained is not known yet
    run = begin(source, lr_decay_style="linear", lr_decay_samples=9, train_samples=UNBOUNDED)
    assert open_step(True, {"iteration": 0, "model": []})
    run.args.consumed_train_samples = finish_step(99, {})
    source.finish()
    assert not open_step(True, {"iteration": 1, "model": []})
    assert "the LR schedule is 9 rollouts long, but 2 were trained;" in capsys.readouterr().out


def calculators(argv: list[str]) -> list[Any]:
    """Of Megatron where there are no arguments or the flag is off; ours, lost or wrong."""
    from megatron.training import global_vars

    build = building_calculator(lambda *positional, **named: (positional, named), check_in_place)
    found: list[Any] = []
    for args in (None, argparse.Namespace(), arguments(dynamic_global_batch=False)):
        global_vars._GLOBAL_ARGS = args
        found.append(build(8, rank=0))
    global_vars._GLOBAL_ARGS = arguments()
    with pytest.raises(SiteError, match="hooks were lost"):
        build()
    with pytest.raises(OptionError) as raised:
        train_stock(argv, install_hooks=True)
    return [*found, str(raised.value)]


def test_the_flag_decides_whose_calculator_counts(source: RolloutDirectory) -> None:
    write(source, [True] * 2)
    argv = [
        "--dynamic-global-batch", "--rollout-path", str(source.path), "--rollouts-per-step", "4",
        "--max-tokens-per-gpu", "64", "--keep-batches", "-1",
    ]  # fmt: skip
    (found,) = run_ranks(1, calculators, argv, process_group=False)
    assert found[:3] == [((8,), {"rank": 0})] * 3
    assert found[3] == "--keep-batches -1: give a number of batches, 0 or more"


def test_the_calculator_of_a_run_has_nothing_to_update() -> None:
    calculator = StepCalculator(start_session(arguments()))
    calculator.update(100, True)
    assert calculator.get() == 1

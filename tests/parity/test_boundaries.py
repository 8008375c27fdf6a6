"""Between batches: the policy seam, the end of the rollouts, and a batch that never comes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.parity.compare import deviations, tensor_deviation
from tests.parity.job import NOTES, Cell, assemble, run_cell, shards_of
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe
from tests.parity.rollouts import STEP_SIZES, batch_flags, make_steps, write_batches
from tests.parity.test_layouts import Reference, name_of

GATHERED = {
    "use-distributed-optimizer": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
}


def generate(path: Path, cursor: Any, model: list[Any]) -> None:
    """A toy generator: rank 0 writes the batch that is asked for; notes cursor and weights."""
    NOTES.append((cursor.batch_id, cursor.consumed_rollouts, shards_of(model)))
    if dist.get_rank() == 0:
        last = cursor.batch_id == len(STEP_SIZES) - 1
        write_batches(path, [make_steps()[cursor.batch_id]], finish=last)


def register(path: Path) -> None:
    """Give the seam its function, as a script would."""
    import megatron_dynbatch

    megatron_dynbatch.on_batch_needed(partial(generate, path))


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(dp=2), {}),
        pytest.param(Layout(pp=2), {}, marks=pytest.mark.slow),
        pytest.param(Layout(dp=2), GATHERED, marks=pytest.mark.slow),
    ],
    ids=["DP2", "PP2", "DP2-gathered"],
)
def test_the_policy_seam_sees_current_weights_whenever_a_batch_is_needed(
    layout: Layout, more: dict[str, object], tmp_path: Path, reference: Reference
) -> None:
    path = tmp_path / "rollouts"
    flags = {**batch_flags(path), **layout.flags(), **more}
    observed = run_cell(Cell(layout.ranks, flags, prepare=partial(register, path)))
    steps = reference(Recipe())
    assert deviations(observed, steps, tensors=False)["metrics"] < 1e-5
    consumed = [0, *(step.consumed for step in steps[:-1])]
    for one in observed:
        assert [note[:2] for note in one.notes] == list(enumerate(consumed))
    initial = Cell().architecture.initial_parameters()
    for number, expected in enumerate([initial, *(step.parameters for step in steps[:-1])]):
        weights = assemble([one.notes[number][2] for one in observed])
        assert tensor_deviation(weights, expected) < 1e-4


@pytest.mark.parametrize(
    "layout", [Layout(dp=2), pytest.param(Layout(pp=2), marks=pytest.mark.slow)], ids=name_of
)
def test_training_ends_with_the_rollouts_and_saves(
    layout: Layout, rollout_path: Path, tmp_path: Path
) -> None:
    flags = {**batch_flags(rollout_path), **layout.flags(), "train-samples": 1000}
    flags |= {"save": tmp_path, "save-interval": 1000}
    observed = run_cell(Cell(layout.ranks, flags))
    assert [row["consumed"] for row in observed[-1].rows] == [8, 13, 25, 28, 37, 45]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"


def test_train_samples_end_the_training_before_the_rollouts_do(rollout_path: Path) -> None:
    flags = {**batch_flags(rollout_path), "train-samples": 25}
    observed = run_cell(Cell(1, flags))
    assert [row["consumed"] for row in observed[0].rows] == [8, 13, 25]


def test_train_iters_end_the_training_before_the_rollouts_do(rollout_path: Path) -> None:
    flags = {**batch_flags(rollout_path), "rollouts-per-step": 5, "train-samples": None}
    flags |= {"train-iters": 2, "lr-decay-samples": None, "lr-decay-iters": 9}
    observed = run_cell(Cell(1, flags))
    assert [row["consumed"] for row in observed[0].rows] == [5, 8]
    horizon = 9 * 5
    factors = [row["learning_rate"] / Recipe().learning_rate for row in observed[0].rows]
    assert factors == pytest.approx([1 - 5 / horizon, 1 - 8 / horizon])


def test_neither_a_batch_nor_the_end_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "rollouts"
    write_batches(path, make_steps()[:1], finish=False)
    flags = {**batch_flags(path), "batch-timeout": 1}
    with pytest.raises(AssertionError) as caught:
        run_cell(Cell(2, flags))
    message = str(caught.value)
    assert "neither rollout batch 1 nor an END marker appeared" in message
    assert os.fspath(path) in message

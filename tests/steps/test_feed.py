"""The feed in one process: order of rollouts, leftovers across batches, resume, and its errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps import BatchTimeout, Cursor, StepFeed
from megatron_dynbatch.steps.cursor import STEP_OPTIONS

LAYOUT = ParallelLayout()


def sample(number: int, rollout_id: int | None = None, *, trained: bool = True) -> Sample:
    """A sample whose first token is its number."""
    tokens = np.array([number, 7, 7], dtype=np.int64)
    return Sample(tokens, loss_mask=[int(trained)] * 2, rollout_id=rollout_id)


def directory(path: Path, sizes: list[int], *, end: bool = True) -> RolloutDirectory:
    """Batches of one-sample rollouts, numbered on through all batches from 1."""
    rollouts = RolloutDirectory(path)
    number = 0
    for size in sizes:
        rollouts.write([sample(number + i + 1, i) for i in range(size)])
        number += size
    if end:
        rollouts.finish()
    return rollouts


def feed(source: RolloutDirectory, **options: object) -> StepFeed:
    chosen = PlanOptions(**{"max_tokens_per_gpu": 12, **options})  # type: ignore[arg-type]
    return StepFeed(source, LAYOUT, chosen, batch_timeout=0.3)


def trained_numbers(steps: StepFeed, limit: int = 100) -> list[list[int]]:
    """First tokens of the samples of each step, until the end or ``limit`` steps."""
    seen: list[list[int]] = []
    while len(seen) < limit and (step := steps.open_step()) is not None:
        rows = step.step_plan.samples
        seen.append([int(step.samples[row].tokens[0]) for row in rows])
        assert steps.finish_step() == len(rows)
    return seen


def test_partial_trains_a_smaller_last_step_of_each_batch(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [7, 2]), rollouts_per_step=3)
    assert trained_numbers(steps) == [[1, 2, 3], [4, 5, 6], [7], [8, 9]]
    assert steps.cursor.consumed_rollouts == 9


def test_carry_puts_leftovers_first_in_the_next_batch_and_loses_none(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [7, 1, 3]), rollouts_per_step=3, leftover="carry")
    assert trained_numbers(steps) == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]


def test_a_batch_too_small_for_a_step_is_carried_whole(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [1, 1, 1, 1]), rollouts_per_step=3, leftover="carry")
    assert trained_numbers(steps) == [[1, 2, 3], [4]]


def test_drop_is_counted(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [10, 4]), rollouts_per_step=4, leftover="drop")
    assert trained_numbers(steps) == [[1, 2, 3, 4], [5, 6, 7, 8], [11, 12, 13, 14]]
    assert steps.cursor.dropped_rollouts == 2
    assert steps.cursor.consumed_rollouts == 12


@pytest.mark.parametrize("leftover", ["partial", "even", "carry"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_resume_continues_at_the_next_rollout(tmp_path: Path, leftover: str, stop: int) -> None:
    source = directory(tmp_path / "r", [7, 5, 3])
    whole = trained_numbers(feed(source, rollouts_per_step=3, leftover=leftover))
    first = feed(source, rollouts_per_step=3, leftover=leftover)
    before = trained_numbers(first, limit=stop)
    saved = first.cursor.to_dict()
    second = feed(source, rollouts_per_step=3, leftover=leftover)
    second.restore(Cursor.from_dict(saved))
    assert before + trained_numbers(second) == whole


def test_resume_after_drop_starts_with_the_next_batch(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [10, 4])
    first = feed(source, rollouts_per_step=4, leftover="drop")
    trained_numbers(first, limit=2)
    second = feed(source, rollouts_per_step=4, leftover="drop")
    second.restore(first.cursor)
    assert trained_numbers(second) == [[11, 12, 13, 14]]


def test_another_step_size_inside_a_batch_is_refused(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [7])
    first = feed(source, rollouts_per_step=3)
    trained_numbers(first, limit=1)
    with pytest.raises(ValueError, match="rollouts_per_step=3, but now rollouts_per_step=2"):
        feed(source, rollouts_per_step=2).restore(first.cursor)


def test_step_options_are_plan_options() -> None:
    assert set(STEP_OPTIONS) <= set(PlanOptions(max_tokens_per_gpu=1).to_dict())


def test_a_step_without_trained_tokens_is_passed_over_and_counted(tmp_path: Path) -> None:
    source = RolloutDirectory(tmp_path / "r")
    source.write([sample(n, n, trained=n not in (3, 4)) for n in range(1, 7)])
    source.finish()
    steps = feed(source, rollouts_per_step=2)
    assert trained_numbers(steps) == [[1, 2], [5, 6]]
    assert steps.cursor.empty_steps == 1
    assert steps.cursor.consumed_rollouts == 6


def test_nothing_within_the_timeout_is_an_error_that_names_the_batch(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [2], end=False), rollouts_per_step=2)
    assert trained_numbers(steps, limit=1) == [[1, 2]]
    with pytest.raises(BatchTimeout, match="neither rollout batch 1 nor an END marker"):
        steps.open_step()


def test_a_run_without_rollouts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="closed without a single rollout"):
        feed(directory(tmp_path / "r", [])).open_step()


def test_the_policy_is_asked_only_when_the_batch_is_not_there(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [2], end=False)
    steps = feed(source, rollouts_per_step=2)
    asked: list[int] = []

    def write_next(cursor: Cursor) -> None:
        asked.append(cursor.batch_id)
        if cursor.batch_id == 3:
            source.finish()
        else:
            source.write([sample(10 * cursor.batch_id, 0)])

    steps.on_batch_needed = write_next
    assert trained_numbers(steps) == [[1, 2], [10], [20]]
    assert asked == [1, 2, 3]


def test_token_ids_outside_the_vocabulary_stop_before_training(tmp_path: Path) -> None:
    directory(tmp_path / "r", [3])
    with pytest.raises(ValueError, match="batch-00000000.*vocabulary size 7"):
        feed(RolloutDirectory(tmp_path / "r", vocab_size=7)).open_step()


def test_the_open_step_must_be_finished_first(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [3]))
    steps.open_step()
    with pytest.raises(RuntimeError, match="finish_step"):
        steps.open_step()


def test_micro_batches_end_at_the_planned_count(tmp_path: Path) -> None:
    step = feed(directory(tmp_path / "r", [3])).open_step()
    assert step is not None and step.num_microbatches == 1
    with pytest.raises(IndexError, match="has 1 micro-batches on DP rank 0; micro-batch 1"):
        step.micro_batch(1)

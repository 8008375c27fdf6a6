"""Rollouts into steps: built-in splitters, one's own, and the validator."""

from __future__ import annotations

import pytest

from megatron_dynbatch.plan import ParallelLayout, PlanError, PlanOptions, make_plan
from megatron_dynbatch.plan.splitters import split_steps
from megatron_dynbatch.rollouts.index import SampleIndex
from tests.plan.helpers import make_index


def steps_of(index: SampleIndex, **options: object) -> list[list[int]]:
    settings = PlanOptions(max_tokens_per_gpu=64, **options)  # type: ignore[arg-type]
    return [step.tolist() for step in split_steps(index, settings)]


def backwards(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    return [[rollout] for rollout in reversed(range(index.num_rollouts))]


def twice(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    return [[0], [0]]


def empty_step(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    return [[0, 1, 2], []]


def out_of_range(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    return [[0, 1, 2, 3]]


def forgetful(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    return [[0, 2]]


def test_the_whole_batch_is_one_step_by_default() -> None:
    assert steps_of(make_index([3] * 4)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("num_rollouts", "limit", "sizes"),
    [(10, 4, [4, 3, 3]), (9, 4, [3, 3, 3]), (8, 4, [4, 4]), (1, 4, [1]), (5, 4, [3, 2])],
)
def test_even_steps_differ_by_at_most_one(num_rollouts: int, limit: int, sizes: list[int]) -> None:
    index = make_index([3] * num_rollouts)
    for options in ({"leftover": "even"}, {"step_splitter": "even"}):
        steps = steps_of(index, rollouts_per_step=limit, **options)
        assert [len(step) for step in steps] == sizes
        assert [rollout for step in steps for rollout in step] == list(range(num_rollouts))


def test_even_steps_of_whole_groups_never_exceed_the_limit() -> None:
    index = make_index([3] * 8, group_ids=[0, 0, 0, 1, 1, 1, 2, 2], rollout_ids=list(range(8)))
    steps = steps_of(index, rollouts_per_step=5, leftover="even", loss_reduction="group")
    assert steps == [[0, 1, 2], [3, 4, 5, 6, 7]]


def test_token_budget() -> None:
    index = make_index([5, 6, 4, 20, 1], rollout_ids=[0, 1, 1, 2, 3])
    options = {"step_splitter": "tokens", "tokens_per_step": 15}
    assert steps_of(index, **options) == [[0, 1], [2], [3]]
    assert steps_of(index, **options, leftover="carry") == [[0, 1], [2]]
    with pytest.raises(PlanError, match="needs tokens_per_step"):
        steps_of(index, step_splitter="tokens")


def test_prompt_groups_that_arrive_interleaved() -> None:
    index = make_index([3] * 4, rollout_ids=[0, 1, 2, 3], group_ids=[7, 8, 7, 8])
    assert steps_of(index, step_splitter="groups", rollouts_per_step=2) == [[0, 2], [1, 3]]
    assert steps_of(index, step_splitter="rollouts", rollouts_per_step=2) == [[0, 1], [2, 3]]


def test_own_splitter_by_import_path() -> None:
    index = make_index([3, 4, 5])
    options = PlanOptions(max_tokens_per_gpu=8, step_splitter=f"{__name__}:backwards")
    plan = make_plan(index, ParallelLayout(), options)
    plan.check()
    assert [step.samples.tolist() for step in plan.steps] == [[2], [1], [0]]


@pytest.mark.parametrize(
    ("splitter", "message"),
    [
        (f"{__name__}:twice", "rollout 0 appears a second time in step 1"),
        (f"{__name__}:empty_step", "step 1 is empty"),
        (f"{__name__}:out_of_range", "step 0 names rollout 3"),
        (f"{__name__}:forgetful", "rollout 1 is in no step"),
        (f"{__name__}:absent", "cannot be imported"),
        ("no_such_package:f", "cannot be imported"),
        ("nonsense", "is unknown: use one of rollouts, groups, even, tokens"),
    ],
)
def test_splitters_that_answer_nonsense(splitter: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        steps_of(make_index([3, 4, 5]), step_splitter=splitter)


def test_splitter_may_leave_rollouts_to_the_next_batch() -> None:
    options = PlanOptions(
        max_tokens_per_gpu=8, step_splitter=f"{__name__}:forgetful", leftover="carry"
    )
    plan = make_plan(make_index([3, 4, 5]), ParallelLayout(), options)
    plan.check()
    assert plan.carried == (1,)


def test_splitter_that_cuts_a_prompt_group() -> None:
    index = make_index([3, 4, 5], rollout_ids=[0, 1, 2], group_ids=[4, 9, 9])
    with pytest.raises(PlanError, match="cuts prompt group 9: sample 2"):
        steps_of(index, step_splitter=f"{__name__}:backwards", loss_reduction="group")

"""Small inputs with values worked out by hand: one kind of planning fault each."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dynbatch.plan import ParallelLayout, PlanError, PlanOptions, make_plan
from megatron_dynbatch.plan.packing.bounds import makespan_bound
from tests.plan.helpers import flat, make_index, packed_lengths, plan_lengths


@pytest.mark.parametrize(
    ("lengths", "cap", "count"),
    [
        ([3, 3, 3, 5, 5], 10, 2),
        ([60, 60, 60], 100, 3),
        ([7] * 8, 8, 8),
        ([4, 4, 4, 4, 6, 6, 6, 6], 10, 4),
    ],
)
def test_number_of_micro_batches_on_one_rank(lengths: list[int], cap: int, count: int) -> None:
    plan = plan_lengths(lengths, cap)
    assert plan.steps[0].num_microbatches == count
    assert all(sum(rows) <= cap for rows in flat(packed_lengths(plan)))


def test_two_exactly_full_micro_batches() -> None:
    plan = plan_lengths([5, 5, 4, 3, 3], 10)
    assert [sum(rows) for rows in flat(packed_lengths(plan))] == [10, 10]


def test_oversize_samples_are_alone_and_reported() -> None:
    plan = plan_lengths([2, 25, 3, 3], 10, oversize="alone")
    assert flat(packed_lengths(plan)) == [[2, 3, 3], [25]]
    assert plan.oversize == (1,)
    plan = plan_lengths([120, 10], 100, oversize="alone")
    assert flat(packed_lengths(plan)) == [[10], [120]]
    assert plan.steps[0].num_dummies == 0


def test_oversize_samples_dropped_with_their_rollout() -> None:
    plan = plan_lengths([2, 25, 3, 3], 10, oversize="drop")
    assert (plan.dropped, plan.oversize) == ((1,), (1,))
    assert plan.steps[0].step_global_batch_size == 3
    assert plan.sample_denoms.tolist() == [2, 0, 3, 3]


def test_rollout_that_loses_an_oversize_sample_is_averaged_over_the_rest() -> None:
    index = make_index([4, 25, 6, 5], rollout_ids=[0, 0, 0, 1])
    options = PlanOptions(max_tokens_per_gpu=20, oversize="drop")
    plan = make_plan(index, ParallelLayout(), options)
    plan.check()
    assert plan.sample_denoms.tolist() == [10, 0, 10, 5]
    assert plan.steps[0].step_global_batch_size == 2


def test_oversize_is_an_error_by_default_naming_sample_and_length() -> None:
    with pytest.raises(PlanError, match=r"sample 1 \(rollout -1\) has 25.*--max-tokens-per-gpu"):
        plan_lengths([2, 25, 3, 3], 10)


def test_three_alone_on_two_ranks_need_one_dummy() -> None:
    plan = plan_lengths([9, 9, 9], 10, ParallelLayout(dp=2))
    assert plan.steps[0].num_microbatches == 2
    assert plan.steps[0].num_dummies == 1


def test_two_that_fit_together_go_to_two_ranks() -> None:
    plan = plan_lengths([10, 10], 100, ParallelLayout(dp=2))
    assert packed_lengths(plan) == [[[10]], [[10]]]


def test_fewer_samples_than_ranks() -> None:
    plan = plan_lengths([10, 20, 30], 100, ParallelLayout(dp=4))
    assert plan.steps[0].num_microbatches == 1
    assert plan.steps[0].num_dummies == 1


def test_interleaved_group_raises_the_count() -> None:
    layout = ParallelLayout(dp=2, pp=2, vpp=2, vpp_group=4)
    plan = plan_lengths([90] * 5, 100, layout)
    assert plan.steps[0].num_microbatches == 4
    assert plan.steps[0].num_dummies == 3


def test_interleaved_pairs_without_dummy() -> None:
    layout = ParallelLayout(dp=2, pp=2, vpp=2, vpp_group=2)
    plan = plan_lengths([9, 1, 9, 1, 9, 1, 1, 1], 10, layout)
    step = plan.steps[0]
    assert (step.num_microbatches, step.num_dummies) == (2, 0)
    assert step.samples.tolist() == list(range(8))


def test_static_micro_batches_are_split_and_never_padded() -> None:
    options = PlanOptions(micro_batch_size=2)
    plan = make_plan(make_index([7, 5, 6, 4, 3]), ParallelLayout(dp=2), options)
    plan.check()
    assert sorted(len(rows) for rank in plan.steps[0].micro_batches for rows in rank) == [
        1,
        1,
        1,
        2,
    ]


def test_zero_lengths_are_rejected_with_their_ids() -> None:
    with pytest.raises(ValueError, match=r"0 \(rollout 4\), 2 \(rollout 6\)"):
        make_plan(
            make_index([0, 3, 0], rollout_ids=[4, 5, 6]),
            ParallelLayout(),
            PlanOptions(max_tokens_per_gpu=8),
        )


def test_samples_are_counted_as_laid_out_under_context_parallelism() -> None:
    plan = plan_lengths([1] * 16, 4, ParallelLayout(cp=4))
    assert [len(rows) for rows in plan.steps[0].micro_batches[0]] == [2] * 8


def test_ranks_need_not_hold_equally_many_samples() -> None:
    plan = plan_lengths([100, 1, 1, 1, 1, 1], 100, ParallelLayout(dp=2))
    assert sorted(sum(rank[0]) for rank in packed_lengths(plan)) == [5, 100]


@pytest.mark.parametrize(
    ("leftover", "sizes"),
    [("partial", [3, 3, 1]), ("even", [3, 2, 2]), ("carry", [3, 3]), ("drop", [3, 3])],
)
def test_leftover_policies_of_seven_rollouts(leftover: str, sizes: list[int]) -> None:
    plan = plan_lengths([4] * 7, 8, rollouts_per_step=3, leftover=leftover)
    assert [step.step_global_batch_size for step in plan.steps] == sizes
    assert plan.carried == ((6,) if leftover == "carry" else ())
    assert plan.dropped == ((6,) if leftover == "drop" else ())


def test_carry_keeps_nothing_when_nothing_follows() -> None:
    options = PlanOptions(max_tokens_per_gpu=8, rollouts_per_step=3, leftover="carry")
    plan = make_plan(make_index([4] * 7), ParallelLayout(), options, last=True)
    plan.check()
    assert [step.step_global_batch_size for step in plan.steps] == [3, 3, 1]
    assert plan.carried == ()


def test_interleaved_rollout_ids() -> None:
    index = make_index([3, 4, 5, 6], rollout_ids=[0, 1, 0, 1])
    options = PlanOptions(max_tokens_per_gpu=20, rollouts_per_step=1)
    plan = make_plan(index, ParallelLayout(), options)
    assert [step.samples.tolist() for step in plan.steps] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(("ids", "count"), [([-1] * 4, 4), ([-1, 0, 0, -1], 3)])
def test_absent_rollout_ids_never_group(ids: list[int], count: int) -> None:
    options = PlanOptions(max_tokens_per_gpu=20)
    plan = make_plan(make_index([3] * 4, rollout_ids=ids), ParallelLayout(), options)
    assert plan.steps[0].step_global_batch_size == count


def test_group_reduction_keeps_prompt_groups_whole() -> None:
    index = make_index([3, 3, 3], rollout_ids=[0, 1, 2], group_ids=[5, 5, 6])
    options = PlanOptions(max_tokens_per_gpu=20, rollouts_per_step=2, loss_reduction="group")
    plan = make_plan(index, ParallelLayout(), options)
    plan.check()
    assert [step.samples.tolist() for step in plan.steps] == [[0, 1], [2]]
    options = PlanOptions(max_tokens_per_gpu=20, rollouts_per_step=1, loss_reduction="group")
    with pytest.raises(PlanError, match="prompt group 5"):
        make_plan(index, ParallelLayout(), options)


def test_step_without_a_trained_token_is_still_a_step() -> None:
    index = make_index([3, 3], rollout_ids=[0, 1], mask_sums=[0, 2])
    options = PlanOptions(max_tokens_per_gpu=20, rollouts_per_step=1, loss_reduction="token")
    plan = make_plan(index, ParallelLayout(), options)
    plan.check()
    first = plan.steps[0]
    assert (first.step_global_batch_size, first.num_trained_tokens) == (1, 0)
    assert first.loss_denominator == 0


def test_fixed_width_wants_a_width_that_the_layout_can_shard() -> None:
    layout = ParallelLayout(cp=2, tp=4, sequence_parallel=True)
    with pytest.raises(PlanError, match="multiple of 16"):
        plan_lengths([3], 20, layout, fixed_width=True)
    with pytest.raises(PlanError, match="smaller than one laid-out row"):
        plan_lengths([3], 4, layout)
    assert plan_lengths([3], 20, layout).options.capacity(layout) == 32


def test_the_rank_of_the_longest_sample_has_no_empty_micro_batch() -> None:
    # Σ / 2 = 31 and the longest is 50, which must share its rank with two others.
    assert makespan_bound(np.array([4, 3, 3, 1, 50, 1]), 2) == 50
    assert makespan_bound(np.array([4, 3, 3, 1, 50, 1]), 2, least=3) == 52

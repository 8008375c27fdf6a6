"""What the step-time model chooses: count, construction and order, by layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dynbatch.plan import CostModel, ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.plan.cost import TOKENS
from megatron_dynbatch.plan.step_time import predict
from megatron_dynbatch.plan.summary import micro_batch_costs, summarize
from tests.plan.helpers import make_index

EIGHT = make_index([12] * 8)


def count_of(layout: ParallelLayout, **options: object) -> int:
    """M of eight samples of 12 tokens, of which a micro-batch holds four."""
    values = {"max_tokens_per_gpu": 48, "cost": TOKENS, **options}
    plan = make_plan(EIGHT, layout, PlanOptions(**values))  # type: ignore[arg-type]
    plan.check()
    return plan.steps[0].num_microbatches


def test_a_pipeline_takes_the_next_count_where_that_is_faster() -> None:
    assert count_of(ParallelLayout()) == 2
    # Two equal micro-batches of 48: 12 a stage, 12 · (2 + 3) = 60. Of 36, 36 and 24 the two heavy
    # ones take 9 a stage: 9 · (2 + 3) + 6 = 51 at most.
    assert count_of(ParallelLayout(pp=4)) == 3
    # The interleaved schedule in groups of 2 accepts 2 and 4.
    assert count_of(ParallelLayout(pp=2, vpp=2)) == 4
    # Three would leave a rank with a dummy: eight samples on four ranks are two each.
    assert count_of(ParallelLayout(dp=4, pp=4)) == 2


def test_a_micro_batch_that_costs_more_than_it_saves_is_not_added() -> None:
    assert count_of(ParallelLayout(pp=4), cost=CostModel(alpha=1, beta=0, gamma=1)) == 3
    # 60 + 10 · (2 + 3) against at least 45 + 10 · (3 + 3), each a quarter per stage.
    assert count_of(ParallelLayout(pp=4), cost=CostModel(alpha=1, beta=0, gamma=100)) == 2
    # At a fixed width a third micro-batch takes as long as a full one; static ones are as asked.
    assert count_of(ParallelLayout(pp=4), fixed_width=True) == 2
    assert count_of(ParallelLayout(pp=4), max_tokens_per_gpu=None, micro_batch_size=4) == 2


def seconds(plan: Plan, layout: ParallelLayout) -> float:
    """Predicted time of a plan's first step, had it been made for another layout."""
    return predict(micro_batch_costs(plan, plan.steps[0]), layout).seconds


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(dp=2, pp=2), ParallelLayout(dp=4, pp=4), ParallelLayout(dp=4, pp=2, ep=4)],
    ids=str,
)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), num_samples=st.integers(1, 80))
@example(seed=12, num_samples=12)
@example(seed=28, num_samples=10)
def test_no_slower_than_a_plan_made_without_a_pipeline(
    layout: ParallelLayout, seed: int, num_samples: int
) -> None:
    draws = np.random.default_rng(seed).lognormal(5, 1, num_samples)
    index = make_index(np.clip(np.rint(draws), 1, 1000).astype(int).tolist())
    options = PlanOptions(max_tokens_per_gpu=1000)
    plain = make_plan(index, replace(layout, pp=1), options)
    plan = make_plan(index, layout, options)
    plan.check()
    assert seconds(plan, layout) <= seconds(plain, layout) * (1 + 1e-9)
    (figures,) = summarize(plan)
    following = layout.next_admissible(figures.fewest_microbatches + 1)
    assert figures.num_microbatches in (figures.fewest_microbatches, following)


@pytest.mark.parametrize("ep", [2, 4])
def test_expert_groups_are_planned_as_groups(ep: int) -> None:
    gains = []
    for seed in range(12):
        draws = np.random.default_rng(seed).lognormal(5, 1, 90)
        index = make_index(np.clip(np.rint(draws), 1, 1000).astype(int).tolist())
        options = PlanOptions(max_tokens_per_gpu=1000)
        grouped, whole = ParallelLayout(dp=8, ep=ep), ParallelLayout(dp=8, ep=8)
        plan = make_plan(index, grouped, options)
        plan.check()
        other = seconds(make_plan(index, whole, options), grouped)
        gains.append(other / seconds(plan, grouped) - 1)
    assert min(gains) >= -1e-9
    assert max(gains) > 0.004

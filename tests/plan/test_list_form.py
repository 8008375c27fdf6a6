"""The way from a plan to its list form and back."""

from __future__ import annotations

import pytest

from megatron_dynbatch.plan import ParallelLayout, Plan, PlanError, PlanOptions, make_plan
from tests.plan.helpers import make_index

CAP = PlanOptions(max_tokens_per_gpu=10)


@pytest.mark.parametrize("leftover", ["partial", "carry", "drop"])
@pytest.mark.parametrize("oversize", ["alone", "drop"])
def test_a_plan_survives_its_list_form(leftover: str, oversize: str) -> None:
    index = make_index([9, 25, 9, 4, 5, 8, 3], rollout_ids=[0, 0, 1, 2, 2, 3, 4])
    options = PlanOptions(
        max_tokens_per_gpu=10, rollouts_per_step=2, leftover=leftover, oversize=oversize
    )
    layout = ParallelLayout(dp=2)
    plan = make_plan(index, layout, options)
    plan.check()
    again = Plan.from_schedule(plan.to_schedule(), index, layout, options)
    assert again.fingerprint == plan.fingerprint


def test_lists_that_do_not_fit_together() -> None:
    index = make_index([4, 5])
    plan = make_plan(index, ParallelLayout(), CAP)
    schedule = plan.to_schedule()
    with pytest.raises(PlanError, match="1 partitions .* dp=2"):
        Plan.from_schedule(schedule, index, ParallelLayout(dp=2), CAP)
    with pytest.raises(PlanError, match="do not tile"):
        Plan.from_schedule(
            schedule._replace(micro_batch_indices=[[[0, 0]]]), index, ParallelLayout(), CAP
        )
    with pytest.raises(PlanError, match="num_microbatches add up to 2"):
        Plan.from_schedule(schedule._replace(num_microbatches=[2]), index, ParallelLayout(), CAP)

"""What a step adds up to, from its micro-batches alone: worked out by hand."""

from __future__ import annotations

import pytest

from megatron_dynbatch.plan import PlanOptions
from megatron_dynbatch.plan.step_plan import make_step
from tests.plan.helpers import make_index


@pytest.mark.parametrize(
    ("reduction", "empty", "denominator"),
    [
        ("rollout", "count", 3),
        ("rollout", "skip", 2),
        ("sample", "count", 4),
        ("sample", "skip", 3),
        ("token", "count", 9),
    ],
)
def test_denominator_and_tokens_of_its_own_samples(
    reduction: str, empty: str, denominator: int
) -> None:
    # Rows 1 and 4 are one rollout; row 0 belongs to another step.
    index = make_index([9, 5, 6, 7, 8], [7, 0, 1, 2, 0], mask_sums=[9, 2, 0, 4, 3])
    options = PlanOptions(max_tokens_per_gpu=20, loss_reduction=reduction, empty_rollouts=empty)
    step = make_step([[[1, 2], [3]], [[4], []]], 3, index, options)
    assert step.micro_batches == (((1, 2), (3,)), ((4,), ()))
    assert (step.step_global_batch_size, step.num_trained_tokens) == (3, 9)
    assert step.loss_denominator == denominator
    assert step.samples.tolist() == [1, 2, 3, 4]

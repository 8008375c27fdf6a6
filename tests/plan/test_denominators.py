"""d and B of the golden fixture, under every reduction."""

from __future__ import annotations

import pytest

from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from tests import golden
from tests.plan.helpers import make_index

# Samples A, B, C, D; C has no trained token.
MASKS, VALUES = (dict(zip("ABCD", rows, strict=True)) for rows in (golden.MASKS, golden.VALUES))


def golden_plan(**options: object) -> Plan:
    index = make_index(
        golden.TOTALS,
        rollout_ids=golden.ROLLOUTS,
        group_ids=golden.GROUPS,
        mask_sums=[sum(mask) for mask in golden.MASKS],
    )
    settings = PlanOptions(max_tokens_per_gpu=64, **options)  # type: ignore[arg-type]
    plan = make_plan(index, ParallelLayout(), settings)
    plan.check()
    return plan


@pytest.mark.parametrize(
    ("reduction", "empty", "denoms", "loss_denominator", "loss"),
    [
        ("rollout", "count", [4, 4, 0, 2], 3, 3.0),
        ("rollout", "skip", [4, 4, 0, 2], 2, 4.5),
        ("sample", "count", [3, 1, 0, 2], 4, 4.25),
        ("sample", "skip", [3, 1, 0, 2], 3, 17 / 3),
        ("token", "count", [1, 1, 1, 1], 6, 26 / 6),
        ("group", "count", [4, 4, 4, 2], 2, 4.5),
    ],
)
def test_golden_denominators_and_loss(
    reduction: str, empty: str, denoms: list[int], loss_denominator: int, loss: float
) -> None:
    plan = golden_plan(loss_reduction=reduction, empty_rollouts=empty)
    assert plan.sample_denoms.tolist() == denoms
    assert plan.steps[0].loss_denominator == loss_denominator
    assert (plan.steps[0].step_global_batch_size, plan.steps[0].num_trained_tokens) == (3, 6)
    total = sum(
        sum(value for value, mask in zip(VALUES[name], MASKS[name], strict=True) if mask) / denom
        for name, denom in zip("ABCD", denoms, strict=True)
        if denom
    )
    assert total / loss_denominator == pytest.approx(loss, rel=1e-15)


def test_constant_denominator_is_the_only_float() -> None:
    plan = golden_plan(loss_reduction="constant", loss_constant=2.5)
    assert plan.sample_denoms.tolist() == [2.5] * 4
    assert plan.steps[0].loss_denominator == 3
    assert golden_plan().sample_denoms.dtype == "int64"


def test_siblings_share_a_denominator_wherever_they_are_packed() -> None:
    index = make_index([3, 1], rollout_ids=[0, 0])
    plan = make_plan(index, ParallelLayout(dp=2), PlanOptions(max_tokens_per_gpu=3))
    assert plan.sample_denoms.tolist() == [4, 4]

"""Faults reported by people who train this way, each with its right value, through Megatron.

Every case is checked with `calculate_per_token_loss` on and off: the reported loss and the
gradient that reaches the optimizer must both be the right number.
"""

import pytest
import torch

from megatron_dynbatch.layout import build_micro_batch
from megatron_dynbatch.losses import megatron_loss
from megatron_dynbatch.plan import ParallelLayout, StepPlan
from tests import golden
from tests.layout.helpers import golden_samples, plan_of
from tests.losses.helpers import mean_of_values, run_step, sample_with

FAN_OUT = [
    sample_with([1.0] * 50, rollout_id=0),
    sample_with([1.0] * 100, rollout_id=0),
    *[sample_with([2.0] * 30, rollout_id=1) for _ in range(3)],
    sample_with([6.0] * 40, rollout_id=2),
]
SIBLINGS = [sample_with([1.0, 2, 3], rollout_id=0), sample_with([10.0], rollout_id=0)]
TWO = [[[0], [1]]]  # one DP rank, two micro-batches

CASES = {
    "tokens, not micro-batches, are averaged": (
        [sample_with([0.5] * 100), sample_with([0.3] * 900)], TWO, "token", 0.32,
    ),
    "uneven micro-batches": (
        [sample_with([4.0]), sample_with([0.0] * 3)], TWO, "token", 1.0,
    ),
    "fan-out, rollout": (FAN_OUT, [[[0, 2], [1, 3], [4, 5]]], "rollout", 3.0),
    "fan-out, sample": (FAN_OUT, [[[0, 2], [1, 3], [4, 5]]], "sample", 14 / 6),
    "fan-out, token": (FAN_OUT, [[[0, 2], [1, 3], [4, 5]]], "token", 570 / 280),
    "fan-out, siblings on two ranks": (FAN_OUT, [[[0, 2], [5]], [[1, 3], [4]]], "rollout", 3.0),
    "siblings in two micro-batches": (SIBLINGS, TWO, "rollout", 4.0),
    "a dummy": ([sample_with([1.0, 1.0])], [[[0], []]], "token", 1.0),
    "a dummy on another rank": ([sample_with([1.0, 1.0])], [[[0]], [[]]], "token", 1.0),
    "a sample that is all masked": (
        [sample_with([1.0] * 3), sample_with([1.0] * 3, [0, 0, 0])], TWO, "token", 1.0,
    ),
    "a mask with holes": ([sample_with([2.0, 9, 9, 4], [1, 0, 0, 1])], [[[0]]], "sample", 3.0),
    "NaN where masked": (
        [sample_with([2.0, float("nan"), float("inf"), 4], [1, 0, 0, 1])], [[[0]]], "sample", 3.0,
    ),
    "a response of no tokens": ([sample_with([2.0]), sample_with([])], TWO, "token", 2.0),
}  # fmt: skip


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per-token"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_case(case, cp, per_token):
    samples, micro_batches, reduction, expected = CASES[case]
    plan = plan_of(samples, micro_batches, ParallelLayout(dp=len(micro_batches), cp=cp), reduction)
    loss, gradient = run_step(plan, samples, per_token)
    # 0.3 travels as float32, hence the bar.
    assert loss == pytest.approx(expected, rel=1e-7)
    assert gradient == pytest.approx(loss, rel=1e-14)


@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per-token"])
@pytest.mark.parametrize("reduction", golden.REDUCTIONS)
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(
    "micro_batches", [[[[0, 1, 2, 3]]], [[[0, 3], [1, 2]]], [[[3]], [[2, 0, 1]]]]
)
def test_golden_fixture(reduction, cp, micro_batches, per_token):
    samples = golden_samples(log_probs=golden.VALUES)
    constant = 8.0 if reduction == "constant" else None
    layout = ParallelLayout(dp=len(micro_batches), cp=cp)
    plan = plan_of(samples, micro_batches, layout, reduction, constant)
    expected = golden.REDUCTIONS[reduction].loss
    assert run_step(plan, samples, per_token) == pytest.approx((expected, expected), rel=1e-14)


def test_one_trained_token_on_one_context_parallel_rank():
    samples = [sample_with([0.0] * 6 + [3.0], [0] * 6 + [1])]
    for cp in (1, 2):
        plan = plan_of(samples, [[[0]]], ParallelLayout(cp=cp), "token")
        assert run_step(plan, samples, False) == (3.0, 3.0)


def test_a_context_parallel_rank_without_response_runs_backward():
    # T = 256, R = 16, C = 2: the response is predicted at 239 … 254, all of it on rank 0.
    values = [float(v) for v in range(16)]
    sample = sample_with([0.0] * 239 + values, [0] * 239 + [1] * 16)
    assert sample.total_length == 256
    for rank in range(2):
        plan = plan_of([sample], [[[0]]], ParallelLayout(cp=2), "token")
        mb = build_micro_batch(plan, 0, 0, 0, {0: sample}, cp_rank=rank)
        theta = torch.ones((), dtype=torch.float64, requires_grad=True)
        mean_of_values(theta, mb).backward()
        assert theta.grad.item() == (sum(values) if rank == 0 else 0.0)


def test_megatron_loss_by_hand():
    step = StepPlan((((0,), (1,)), ((2,), ())), 3, 5, 7)
    layout = ParallelLayout(dp=2, cp=3)
    l = torch.tensor(10.0, dtype=torch.float64)  # noqa: E741
    loss, n, count = megatron_loss(l, step, layout, calculate_per_token_loss=False)
    assert (loss.item(), n.item(), count) == (10 * 2 * 6 / 5, 1, 5 / 12)
    loss, n, count = megatron_loss(l, step, layout, calculate_per_token_loss=True)
    assert (loss.item(), n.item(), count) == (2.0, 0, 5 / 12)
    loss, _, _ = megatron_loss(l[None], step, layout, calculate_per_token_loss=True)
    assert (loss.item(), loss.dim()) == (2.0, 0)
    with pytest.raises(ValueError, match=r"one value, got shape \[2\]"):
        megatron_loss(torch.ones(2), step, layout, calculate_per_token_loss=True)
    empty = StepPlan((((0,),),), 1, 0, 0)
    with pytest.raises(ValueError, match="loss denominator B is 0"):
        megatron_loss(l, empty, layout, calculate_per_token_loss=True)

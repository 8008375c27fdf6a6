"""What losses report: faults of the field with their right values, over micro-batches and ranks."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch, build_micro_batch
from megatron_dynbatch.losses import megatron_loss, policy
from megatron_dynbatch.plan import ParallelLayout, Plan
from megatron_dynbatch.report import Metric, merge
from megatron_dynbatch.rollouts import Sample
from tests.layout.helpers import plan_of

Loss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor | Metric]]]


def reported(plan: Plan, samples: Sequence[Sample], loss: Loss) -> dict[str, float]:
    """Every rank's and micro-batch's report with the count that Megatron is given beside it."""
    step, layout = plan.steps[0], plan.layout
    contributions = []
    for dp_rank in range(layout.dp):
        for cp_rank in range(layout.cp):
            for k in range(step.num_microbatches):
                mb = build_micro_batch(
                    plan, 0, dp_rank, k, dict(enumerate(samples)), cp_rank=cp_rank
                )
                local_sum, report = loss(mb)
                count = megatron_loss(local_sum, step, layout, calculate_per_token_loss=False)[2]
                contributions.append({
                    n: x if isinstance(x, Metric) else Metric.mean(x, count)
                    for n, x in report.items()
                })  # fmt: skip
    return {name: m.value() for name, m in merge(contributions, "micro-batch").items()}


def sample(ratios: Sequence[float], rollout: int = 0) -> Sample:
    """One prompt token; the policy moves by `ratios` from old log-probs of −1."""
    return Sample(
        np.arange(len(ratios) + 1), loss_mask=[1] * len(ratios), rollout_id=rollout, advantage=1.0,
        log_probs=np.full(len(ratios), -1.0), rollout_log_probs=np.log(ratios) - 1.0,
    )  # fmt: skip


def moved_policy(mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor | Metric]]:
    """The clipped loss where the log-probs now are those of the column `rollout_log_probs`."""
    return policy(-mb.column("rollout_log_probs"), mb, ratio_extremes=True)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(cp=2)])
def test_clip_fraction_counts_tokens_not_micro_batches(layout: ParallelLayout) -> None:
    samples = [sample([2.0]), sample([1.0, 1.1, 0.9], rollout=1)]
    split = [[[0], [1]]] if layout.dp == 1 else [[[0]], [[1]]]
    plan = plan_of(samples, split, layout, "token")
    found = reported(plan, samples, moved_policy)
    assert found["clip_fraction"] == pytest.approx(0.25)
    assert (found["ratio_min"], found["ratio_max"]) == pytest.approx((0.9, 2.0), rel=1e-6)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("reduction", ["token", "sample", "rollout"])
def test_entropy_is_the_same_number_under_context_parallelism(cp: int, reduction: str) -> None:
    # Two tokens with p and 1 − p, p such that the entropy is 0.3.
    low, high = 0.5, 1.0
    for _ in range(100):
        p = (low + high) / 2
        low, high = (p, high) if -p * math.log(p) - (1 - p) * math.log1p(-p) > 0.3 else (low, p)
    samples = [sample([1.0] * n, rollout=n % 2) for n in (3, 1, 6, 2)]
    plan = plan_of(samples, [[[0, 1], [2, 3]]], ParallelLayout(cp=cp), reduction)

    def loss(mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor | Metric]]:
        logits = torch.tensor([p, 1 - p], dtype=torch.float64).log().expand(mb.num_tokens, 2)
        # Token ids are above 1; which token is the label does not matter here.
        mb.labels.clamp_(max=1)
        return policy(logits.contiguous(), mb, entropy_coef=0.0)

    assert reported(plan, samples, loss)["entropy"] == pytest.approx(0.3, rel=1e-9)


@pytest.mark.parametrize("cp", [1, 2])
def test_mean_over_rollouts_of_means_over_tokens(cp: int) -> None:
    samples = [sample([3.0, 3.0]), sample([3.0]), sample([5.0] * 7, rollout=1)]
    plan = plan_of(samples, [[[0, 2], [1]]], ParallelLayout(cp=cp), "rollout")
    assert reported(plan, samples, moved_policy)["ratio"] == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize(("dual", "loss", "slope"), [(None, math.exp(20), 0.0), (3.0, 3.0, 0.0)])
def test_a_log_ratio_of_100_is_clamped_and_counted(
    dual: float | None, loss: float, slope: float
) -> None:
    far = Sample([1, 2], loss_mask=[1], advantage=-1.0, log_probs=[-100.0])
    plan = plan_of([far], [[[0]]], reduction="token")
    mb = build_micro_batch(plan, 0, 0, 0, {0: far})
    output = torch.zeros(2, requires_grad=True)
    found, sums = policy(output, mb, dual_clip=dual)
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert sums["ratio_clamped"].item() == 1.0
    assert output.grad.tolist() == [slope, 0.0]

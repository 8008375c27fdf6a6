"""Factors of auxiliary losses: parts of the step's tokens, counted here sample by sample."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dynbatch.hooks.aux_loss import AuxScales, aux_scales, rolled_mask
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.rollouts import Sample, SampleIndex
from megatron_dynbatch.steps import Step
from tests.hooks.helpers import training_options

# Tokens, prompt; more ranks than two of the steps' samples can fill.
SHAPES = [(17, 3), (5, 1), (9, 0), (12, 11), (3, 2)]
LAYOUTS = [ParallelLayout(), ParallelLayout(dp=2), ParallelLayout(cp=2), ParallelLayout(dp=8, cp=2)]


def make_samples() -> list[Sample]:
    """Every third token of a response is masked out, and the first one without a prompt."""
    samples = []
    for number, (total, prompt) in enumerate(SHAPES):
        mask = [int(j % 3 != 2 and (prompt or j > 0)) for j in range(total - prompt)]
        samples.append(Sample(np.ones(total, np.int64), loss_mask=mask, rollout_id=number // 2))
    return samples


def predicted(sample: Sample) -> int:
    """Trained tokens that are at least the third: what the token two before them predicts."""
    prompt = sample.total_length - sample.response_length
    return sum(int(m) for j, m in enumerate(sample.loss_mask) if prompt + j >= 2)


SAMPLES = make_samples()
TOKENS = sum(total for total, _ in SHAPES)
PREDICTED = sum(map(predicted, SAMPLES))


def plan_for(layout: ParallelLayout) -> Plan:
    given = PlanOptions(max_tokens_per_gpu=24 // layout.cp)
    return make_plan(SampleIndex.from_samples(SAMPLES), layout, given)


def runs(layout: ParallelLayout, **changed: Any) -> Iterator[tuple[Any, Step]]:
    """What the hooks share on every DP and CP rank."""
    plan = plan_for(layout)
    for rank in range(layout.dp * layout.cp):
        step = Step(
            plan, 0, 0, dp_rank=rank // layout.cp, cp_rank=rank % layout.cp,
            samples=dict(enumerate(SAMPLES)), width=None, device="cpu",
        )  # fmt: skip
        given = training_options(num_experts=4, mtp_num_layers=1, **changed)
        run = SimpleNamespace(
            step=step, layout=layout, options=given, aux_scales={}, mtp_tokens=PREDICTED
        )
        yield run, step


def tokens_of(step: Step, k: int) -> int:
    rows = step.step_plan.micro_batches[step.dp_rank][k]
    return sum(SAMPLES[row].total_length for row in rows)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("per_token", [False, True])
def test_factors_are_parts_of_the_steps_tokens(layout: ParallelLayout, per_token: bool) -> None:
    world, total_mtp, seen_by_routers = layout.dp * layout.cp, 0.0, 0
    z_losses: dict[tuple[int, int], list[float]] = {}
    for run, step in runs(layout, calculate_per_token_loss=per_token):
        for k in range(step.num_microbatches):
            scales, tokens = aux_scales(run, k), tokens_of(step, k)
            assert aux_scales(run, k) is scales
            if not tokens:
                assert scales == AuxScales(0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0)
                continue
            share = tokens / TOKENS
            assert scales.share == pytest.approx(share, rel=1e-14)
            # Megatron averages over ranks, or multiplies by the router's tokens and CP.
            factor = 1 / (scales.router_tokens * layout.cp) if per_token else world
            assert scales.moe == pytest.approx(share * factor, rel=1e-14)
            assert scales.moe_log == pytest.approx(share * layout.dp * step.num_microbatches)
            expected = scales.router_tokens * layout.cp / tokens
            assert scales.z_loss == pytest.approx(expected, rel=1e-14)
            assert scales.mtp_log == pytest.approx(scales.mtp * step.num_microbatches)
            z_losses.setdefault((step.dp_rank, k), []).append(scales.z_loss)
            total_mtp += scales.mtp
            seen_by_routers += scales.router_tokens
    assert seen_by_routers == TOKENS
    # The ranks' parts of a micro-batch's mean make up the mean.
    assert all(sum(parts) / layout.cp == pytest.approx(1.0) for parts in z_losses.values())
    if layout.cp == 1:  # a rank without a predicted token still counts one
        assert total_mtp == pytest.approx(world, rel=1e-12)


def test_mtp_is_weighted_by_what_each_micro_batch_predicts() -> None:
    ((run, step),) = runs(ParallelLayout())
    for k, rows in enumerate(step.step_plan.micro_batches[0]):
        count = sum(predicted(SAMPLES[row]) for row in rows)
        assert aux_scales(run, k).mtp == pytest.approx(count / PREDICTED, rel=1e-14)
        assert rolled_mask(step.packed(k)).sum() == count


def test_a_rank_that_predicts_nothing_counts_as_one_token() -> None:
    samples = [Sample([1, 2, 3, 4], loss_mask=[0, 1]), Sample([1, 2], loss_mask=[1])]
    plan = make_plan(
        SampleIndex.from_samples(samples), ParallelLayout(dp=2), PlanOptions(max_tokens_per_gpu=4)
    )
    found = []
    for rank in range(2):
        step = Step(
            plan, 0, 0, dp_rank=rank, cp_rank=0,
            samples=dict(enumerate(samples)), width=None, device="cpu",
        )  # fmt: skip
        run: Any = SimpleNamespace(
            step=step, layout=plan.layout, options=training_options(mtp_num_layers=1),
            aux_scales={}, mtp_tokens=1,
        )  # fmt: skip
        found.append((tuple(step.step_plan.micro_batches[rank][0]), aux_scales(run, 0).mtp))
    # One of the two has a token to predict, the other must only not divide by zero.
    assert sorted(found) == [((0,), 2.0), ((1,), 2.0)]


def test_without_mtp_tokens_or_layers_there_is_no_mtp_factor() -> None:
    ((run, _),) = runs(ParallelLayout())
    run.mtp_tokens = 0
    assert aux_scales(run, 0).mtp == aux_scales(run, 0).mtp_log == 0.0
    ((run, _),) = runs(ParallelLayout())
    run.options = training_options(num_experts=4)
    assert aux_scales(run, 0).mtp == 0.0

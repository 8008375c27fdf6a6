"""Random plans and batches through the whole way, against brute force; `make fuzz` runs more."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dynbatch.layout import build_micro_batch
from megatron_dynbatch.losses import megatron_loss
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.report.metric import Metric, merge
from megatron_dynbatch.rollouts import RolloutDirectory, Sample, SampleIndex
from tests.reliability import brute

IS_WHOLE = os.environ.get("FUZZ") == "full"
NUM_PLANS = 10_000 if IS_WHOLE else 500
NUM_BATCHES = 1_000 if IS_WHOLE else 50
CAP = 128

QUIET = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": not IS_WHOLE,
    "database": None,
}

REDUCTIONS = ["rollout", "sample", "token", "group", "constant"]

pytestmark = pytest.mark.slow


@st.composite
def settings_of_plans(draw: st.DrawFn) -> tuple[ParallelLayout, PlanOptions]:
    pp = draw(st.sampled_from([1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    layout = ParallelLayout(
        dp=draw(st.integers(1, 5)),
        cp=draw(st.sampled_from([1, 2, 4])),
        tp=draw(st.sampled_from([1, 2])),
        pp=pp,
        vpp=vpp,
        vpp_group=draw(st.sampled_from([None, pp, pp + 1])) if vpp > 1 else None,
        sequence_parallel=draw(st.booleans()),
    )
    reduction = draw(st.sampled_from(REDUCTIONS))
    limits = [None, 30, 50] if reduction == "group" else [None, 1, 3, 8]
    options = PlanOptions(
        max_tokens_per_gpu=CAP,
        rollouts_per_step=draw(st.sampled_from(limits)),
        loss_reduction=reduction,
        loss_constant=2.5 if reduction == "constant" else None,
        leftover=draw(st.sampled_from(["partial", "even", "carry", "drop"])),
        empty_rollouts=draw(st.sampled_from(["count", "skip"])),
        oversize=draw(st.sampled_from(["alone", "drop"])),
        order=draw(st.sampled_from(["auto", "heaviest_first", "light_ends"])),
    )
    return layout, options


def random_index(seed: int, size: int, longest: int) -> SampleIndex:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, size)
    responses = rng.integers(0, lengths)
    masks = rng.integers(0, responses + 1) * (rng.random(size) < 0.8)
    rollouts = rng.integers(-1, max(1, size // 2), size)
    return SampleIndex(
        lengths, responses, masks, rollouts, np.where(rollouts < 0, -1, rollouts // 3)
    )


@settings(max_examples=NUM_PLANS, **QUIET)
@given(
    chosen=settings_of_plans(),
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 25),
    longest=st.sampled_from([1, 40, 300]),
)
def test_plans(
    chosen: tuple[ParallelLayout, PlanOptions], seed: int, size: int, longest: int
) -> None:
    layout, options = chosen
    plan = make_plan(random_index(seed, size, longest), layout, options)
    plan.check()
    brute.check_plan(plan)
    again = Plan.from_json(plan.to_json())
    assert again.fingerprint == plan.fingerprint
    if not plan.carried:
        schedule = plan.to_schedule()
        assert Plan.from_schedule(schedule, plan.index, layout, options).fingerprint == (
            plan.fingerprint
        )


def random_samples(seed: int, size: int) -> list[Sample]:
    """Every sample fits; masks with holes and empty ones; NaN and infinity where masked."""
    index = random_index(seed, size, CAP // 8)
    rng = np.random.default_rng(seed + 1)
    samples = []
    for row in range(size):
        mask = np.zeros(int(index.response_lengths[row]), np.uint8)
        trained = rng.permutation(len(mask))[: int(index.mask_sums[row])]
        mask[trained] = 1
        nothing = rng.choice([np.nan, np.inf, -np.inf, 7.0], len(mask))
        samples.append(
            Sample(
                rng.integers(1, 1000, int(index.total_lengths[row])),
                loss_mask=mask,
                rollout_id=int(index.rollout_ids[row]),
                group_id=int(index.group_ids[row]),
                advantage=rng.normal() if seed % 2 else None,
                values=np.where(mask == 1, rng.normal(size=len(mask)), nothing),
            )
        )
    return samples


def reduced(plan: Plan, number: int, rank_samples: list[dict[int, Sample]]) -> tuple[float, float]:
    """The loss as Megatron sums it up, and as the report has it, over all ranks of a step."""
    step, layout = plan.steps[number], plan.layout
    shares = layout.dp * layout.cp
    gradient, reports = 0.0, []
    for dp_rank, samples in enumerate(rank_samples):
        for cp_rank in range(layout.cp):
            for k, rows in enumerate(step.micro_batches[dp_rank]):
                mb = build_micro_batch(plan, number, dp_rank, k, samples, cp_rank=cp_rank)
                tokens = [samples[row].tokens for row in rows]
                own = brute.local_tokens(tokens, layout.cp, cp_rank)
                assert mb.tokens[0, : len(own)].tolist() == own
                local_sum = mb.mean(mb.column("values")) if rows else mb.mean(mb.loss_mask)
                scaled, one, count = megatron_loss(
                    local_sum, step, layout, calculate_per_token_loss=False
                )
                gradient += scaled.item() / one.item() / step.num_microbatches / shares
                reports.append({"loss": Metric.mean(local_sum, count)})
    return gradient, merge(reports, "micro-batch")["loss"].value()


@settings(max_examples=NUM_BATCHES, **QUIET)
@given(chosen=settings_of_plans(), seed=st.integers(0, 2**32 - 1), size=st.integers(1, 12))
def test_batches(chosen: tuple[ParallelLayout, PlanOptions], seed: int, size: int) -> None:
    layout, options = chosen
    samples = random_samples(seed, size)
    with tempfile.TemporaryDirectory() as folder:
        directory = RolloutDirectory(folder, vocab_size=1000)
        directory.write(samples)
        plan = make_plan(directory.index(0), layout, options)
        for number, step in enumerate(plan.steps):
            rows = [[row for mb in rank for row in mb] for rank in step.micro_batches]
            read = [dict(zip(own, directory.read(0, own), strict=True)) for own in rows]
            wanted = brute.loss(samples, step.samples.tolist(), options)
            if wanted is None:
                assert step.num_trained_tokens == 0
                continue
            for found in reduced(plan, number, read):
                assert found == pytest.approx(wanted, rel=1e-12, abs=1e-13)


torch.set_num_threads(1)

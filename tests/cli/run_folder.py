"""The folder of a run as training leaves it: planned rollouts, and a report for each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_dynbatch.handshake import publish_layout, write_planned
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.plan.summary import StepSummary, summarize
from megatron_dynbatch.report import StepReport, StepReportWriter
from megatron_dynbatch.rollouts import RolloutDirectory, Sample

LAYOUT = ParallelLayout(dp=2, pp=2)
OPTIONS = PlanOptions(max_tokens_per_gpu=256, rollouts_per_step=24, leftover="even")


def write_run(folder: Path, num_batches: int, seed: int = 0) -> list[StepReport]:
    """Write rollouts and steps.jsonl; returns the reports."""
    rng = np.random.default_rng(seed)
    directory = RolloutDirectory(folder / "rollouts")
    publish_layout(directory, LAYOUT, OPTIONS)
    writer = StepReportWriter(folder / "steps.jsonl")
    reports: list[StepReport] = []
    for batch in range(num_batches):
        samples = _rollouts(rng, int(rng.integers(12, 60)), batch / num_batches)
        write_planned(directory, samples)
        plan = make_plan(directory.index(batch), LAYOUT, OPTIONS)
        for summary in summarize(plan):
            reports.append(_report(rng, plan, summary, batch, reports))
            writer.write(reports[-1])
    writer.close()
    return reports


def _rollouts(rng: np.random.Generator, count: int, progress: float) -> list[Sample]:
    samples = []
    for rollout in range(count):
        reward = float(rng.random() < 0.2 + 0.6 * progress)
        for _ in range(int(rng.integers(1, 4))):
            length = int(np.clip(rng.lognormal(3.4, 0.6), 6, 250))
            samples.append(
                Sample(np.arange(length), response_length=length // 2, rollout_id=rollout,
                       reward=reward)
            )  # fmt: skip
    return samples


def _report(
    rng: np.random.Generator, plan: Plan, summary: StepSummary, batch: int, before: list[StepReport]
) -> StepReport:
    step = plan.steps[summary.step]
    number = len(before) + 1
    consumed = before[-1].consumed_rollouts if before else 0
    room = 256 * step.num_microbatches * plan.layout.dp
    tokens = int(plan.index.total_lengths[step.samples].sum())
    return StepReport(
        iteration=number,
        batch_id=batch,
        step_index=summary.step,
        step_global_batch_size=summary.num_rollouts,
        num_samples=summary.num_samples,
        num_microbatches=summary.num_microbatches,
        num_dummies=summary.num_dummies,
        num_tokens=tokens,
        num_trained_tokens=step.num_trained_tokens,
        fill=tokens / room,
        consumed_rollouts=consumed + summary.num_rollouts,
        learning_rate=1e-3,
        grad_norm=float(rng.lognormal(0, 0.3)),
        loss_scale=1.0,
        skipped=False,
        metrics={"loss": 2.0 / number**0.5 + float(rng.normal(0, 0.05))},
        fewest_microbatches=summary.fewest_microbatches,
        balance=summary.balance,
        lockstep=summary.lockstep,
        predicted_time=summary.seconds,
        step_time=None if not before else 2e-5 * summary.seconds * float(rng.lognormal(0, 0.1)),
        wait_time=0.0,
    )

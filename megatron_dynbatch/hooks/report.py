"""The report of a step that ran, beside Megatron's own log line.

What the loss function reported is reduced once per step, in one collective that also finds out
whether all ranks reported the same names, before Megatron's own reduction, key by key, could hang.

Reports go to the JSONL of ``--step-report`` and to Megatron's own TensorBoard and W&B writers, as
``train/…`` over the optimizer iteration; where Megatron's lines go to a file, a line about the step
takes their place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_dynbatch import quiet
from megatron_dynbatch.hooks.session import Session
from megatron_dynbatch.output import progress
from megatron_dynbatch.plan.summary import StepSummary, summarize
from megatron_dynbatch.report import (
    Metric,
    StepReport,
    StepReportWriter,
    merge,
    reduce_over_ranks,
)
from megatron_dynbatch.report.identity import write_identity
from megatron_dynbatch.report.step_line import step_line
from megatron_dynbatch.steps import Step

# (run, end of its last step): a new run in the same process has no step before its first.
_last_end: tuple[int, float] | None = None
# (run, batch, figures of its steps)
_summaries: tuple[int, int, list[StepSummary]] | None = None


def report_step(run: Session, step: Step, frame: Mapping[str, Any]) -> None:
    """Write the step's report wherever it is wanted; called on every rank.

    Args:
        run: The run.
        step: The step that just ran.
        frame: Locals of Megatron's `training_log`.
    """
    # Megatron's writers live on the last rank, which also holds the reduced loss.
    wanted = run.options.step_report or quiet.is_on() or _writes_now(run, frame)
    if wanted and _is_last_rank():
        report = step_report(run, step, frame)
        if run.options.step_report:
            if run.writer is None:
                run.writer = StepReportWriter(run.options.step_report)
                write_identity(run.writer.path, run.args, run.layout.to_dict())
            run.writer.write(report)
        if quiet.is_on():
            progress(_line(run, report))
        if _writes_now(run, frame):
            write_scalars(report, frame.get("writer"), frame.get("wandb_writer"))


def reduced_reports(reports: Sequence[Mapping[str, Metric]]) -> list[dict[str, torch.Tensor]]:
    """A step's reports as Megatron's `train_step` reads them, already over all ranks.

    Args:
        reports: Of each micro-batch of this rank; empty before the last pipeline stage.

    Returns:
        One dict: name → [value, 1], which Megatron's own sum over ranks leaves as it is; empty
        where nothing was reported.

    Raises:
        ValueError: On every rank: a metric that some micro-batches or ranks lack, naming both.
    """
    if not reports:
        return []
    from megatron.core import mpu

    merged = merge(reports, "micro-batch")
    values = reduce_over_ranks(merged, mpu.get_data_parallel_group(with_context_parallel=True))
    device = torch.device("cuda", torch.cuda.current_device())
    pairs = torch.tensor(
        [[value, 1.0] for value in values.values()], dtype=torch.float64, device=device
    )
    return [dict(zip(values, pairs, strict=True))]


def _is_last_rank() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == dist.get_world_size() - 1


def _line(run: Session, report: StepReport) -> str:
    options = run.options
    return step_line(report, num_steps=options.train_iters, num_rollouts=options.train_samples)


def _writes_now(run: Session, frame: Mapping[str, Any]) -> bool:
    # Megatron writes to W&B only where it has a TensorBoard writer, and only at this interval.
    interval = run.options.tensorboard_log_interval
    return bool(frame.get("writer")) and frame["iteration"] % interval == 0


def write_scalars(report: StepReport, writer: Any, wandb_writer: Any) -> None:
    """Every number of a report to Megatron's writers.

    Args:
        report: The step's.
        writer: TensorBoard's `SummaryWriter`.
        wandb_writer: The `wandb` module, or None.
    """
    scalars = report.scalars()
    for name, value in scalars.items():
        writer.add_scalar(name, value, report.iteration)
    if wandb_writer:
        wandb_writer.log(scalars, report.iteration)


def step_report(run: Session, step: Step, frame: Mapping[str, Any]) -> StepReport:
    """The report of a finished step from the arguments of `training_log`."""
    plan = step.step_plan
    capacity = run.options.plan.capacity(run.layout)
    assert capacity is not None, "training always has a token cap"
    grad_norm, learning_rate = frame["grad_norm"], frame["learning_rate"]
    summary = _summary(run, step)
    return StepReport(
        iteration=frame["iteration"],
        batch_id=step.batch_id,
        step_index=step.step_index,
        step_global_batch_size=plan.step_global_batch_size,
        num_samples=plan.num_samples,
        num_microbatches=plan.num_microbatches,
        num_dummies=plan.num_dummies,
        num_tokens=step.num_tokens,
        num_trained_tokens=plan.num_trained_tokens,
        fill=step.num_tokens / (capacity * plan.num_microbatches * run.layout.dp),
        consumed_rollouts=run.live_args.consumed_rollouts,
        learning_rate=None if learning_rate is None else float(learning_rate),
        grad_norm=None if grad_norm is None else float(grad_norm),
        loss_scale=float(frame["loss_scale"]),
        skipped=bool(frame["skipped_iter"]),
        metrics={name: float(value) for name, value in frame["loss_dict"].items()},
        fewest_microbatches=summary.fewest_microbatches,
        num_oversize=summary.num_oversize,
        balance=summary.balance,
        lockstep=summary.lockstep,
        predicted_time=summary.seconds,
        step_time=_seconds_since_last(run),
        wait_time=step.wait_seconds,
    )


def _summary(run: Session, step: Step) -> StepSummary:
    """Figures of the step's plan, made once per batch."""
    global _summaries
    if _summaries is None or _summaries[:2] != (run.number, step.batch_id):
        _summaries = (run.number, step.batch_id, summarize(step.plan))
    return _summaries[2][step.step_index]


def _seconds_since_last(run: Session) -> float | None:
    global _last_end
    before, _last_end = _last_end, (run.number, time.monotonic())
    if before is None or before[0] != run.number:
        return None
    return _last_end[1] - before[1]

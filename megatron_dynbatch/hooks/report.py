"""Megatron's own log lines show the step's rollouts; the step report is written beside them.

Seam: the batch size that `training_log` computes. It is evaluated on every rank, once per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dynbatch.hooks.session import Session, session
from megatron_dynbatch.report import StepReport, StepReportWriter
from megatron_dynbatch.steps import Step


def logged_batch_size(stock: int, frame: Mapping[str, Any]) -> int:
    """G of the step that just ran; also the moment when its report is written."""
    run = session()
    if run is None or run.step is None:
        return stock
    if run.args.step_report and _is_last_rank():
        if run.writer is None:
            run.writer = StepReportWriter(run.args.step_report)
        run.writer.write(step_report(run, run.step, frame))
    return run.step.step_global_batch_size


def _is_last_rank() -> bool:
    import torch.distributed as dist

    # The last rank holds the reduced loss, and prints Megatron's log line.
    return dist.get_rank() == dist.get_world_size() - 1


def step_report(run: Session, step: Step, frame: Mapping[str, Any]) -> StepReport:
    """The report of a finished step from the arguments of `training_log`."""
    plan = step.step_plan
    capacity = run.options.capacity(run.layout)
    assert capacity is not None, "training always has a token cap"
    grad_norm, learning_rate = frame["grad_norm"], frame["learning_rate"]
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
        consumed_rollouts=run.args.consumed_train_samples,
        learning_rate=None if learning_rate is None else float(learning_rate),
        grad_norm=None if grad_norm is None else float(grad_norm),
        loss_scale=float(frame["loss_scale"]),
        skipped=bool(frame["skipped_iter"]),
        metrics={name: float(value) for name, value in frame["loss_dict"].items()},
    )

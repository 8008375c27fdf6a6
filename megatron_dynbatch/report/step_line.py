"""A step in one line, for people who watch."""

from __future__ import annotations

from megatron_dynbatch.report.step_report import StepReport
from megatron_dynbatch.wording import counted

# What a loss function calls its objective; else the first metric stands for it.
_LOSSES = ("loss", "lm loss")


def step_line(
    report: StepReport, num_steps: int | None = None, num_rollouts: int | None = None
) -> str:
    """The line of a step.

    Args:
        report: The step's.
        num_steps: Steps of the training, where that is known.
        num_rollouts: Rollouts of the training, likewise.
    """
    of_steps = "" if num_steps is None else f" of {num_steps:,}"
    of_rollouts = "" if num_rollouts is None else f" of {num_rollouts:,}"
    parts = [
        *_loss(report),
        f"{counted(report.step_global_batch_size, 'rollout')} "
        f"({report.consumed_rollouts:,}{of_rollouts} trained)",
        f"{counted(report.num_samples, 'sample')} in "
        f"{counted(report.num_microbatches, 'micro-batch')} per rank",
        f"fill {report.fill:.0%}",
    ]
    if report.grad_norm is not None:
        parts.append(f"grad norm {report.grad_norm:.3g}")
    if report.learning_rate is not None:
        parts.append(f"lr {report.learning_rate:.3g}")
    if report.step_time is not None:
        waited = f" ({report.wait_time:.1f} s waiting)" if report.wait_time else ""
        parts.append(f"{report.step_time:.1f} s{waited}")
    if report.skipped:
        parts.append("update skipped")
    return f"step {report.iteration:,}{of_steps}: {', '.join(parts)}"


def _loss(report: StepReport) -> list[str]:
    named = [name for name in _LOSSES if name in report.metrics] or list(report.metrics)
    return [f"{name} {report.metrics[name]:.4g}" for name in named[:1]]

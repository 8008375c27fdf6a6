"""What the steps were and what they gave: a line, a table, summary.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_dynbatch.report import StepReport

LOSS = "lm loss"


def step_line(report: StepReport, num_steps: int) -> str:
    """One line about a step that just ran."""
    return (
        f"step {report.iteration:>3}/{num_steps}  {report.step_global_batch_size:>3} rollouts  "
        f"{report.num_samples:>3} samples  {report.num_microbatches:>2} micro-batches per rank  "
        f"{report.num_tokens:>6,} tokens  loss {report.metrics[LOSS]:.4f}  "
        f"grad norm {report.grad_norm or 0:.3f}  lr {report.learning_rate or 0:.2e}"
    )


def print_table(reports: Sequence[StepReport]) -> None:
    """A table with one row per step."""
    table = Table(
        box=SIMPLE_HEAD,
        title="One row per training step",
        title_justify="left",
        caption="G: rollouts of the step; M: micro-batches per rank",
        caption_justify="left",
    )
    for heading in (
        "step", "G", "samples", "M", "tokens", "fill", "loss", "grad norm", "LR",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for r in reports:
        table.add_row(
            str(r.iteration), str(r.step_global_batch_size), str(r.num_samples),
            str(r.num_microbatches), f"{r.num_tokens:,}", f"{r.fill:.0%}",
            f"{r.metrics[LOSS]:.4f}", f"{r.grad_norm or 0:.3f}", f"{r.learning_rate or 0:.2e}",
        )  # fmt: skip
    Console().print(table)


def summary(reports: Sequence[StepReport], seconds: float) -> dict[str, Any]:
    """What `summary.json` holds: totals, and the numbers of each step."""
    return {
        "num_steps": len(reports),
        "num_rollouts": sum(r.step_global_batch_size for r in reports),
        "num_samples": sum(r.num_samples for r in reports),
        "num_tokens": sum(r.num_tokens for r in reports),
        "seconds": round(seconds, 1),
        "steps": [
            {
                "iteration": r.iteration,
                "G": r.step_global_batch_size,
                "samples": r.num_samples,
                "M": r.num_microbatches,
                "dummies": r.num_dummies,
                "tokens": r.num_tokens,
                "trained_tokens": r.num_trained_tokens,
                "fill": r.fill,
                "loss": r.metrics[LOSS],
                "grad_norm": r.grad_norm,
                "learning_rate": r.learning_rate,
                "consumed_rollouts": r.consumed_rollouts,
            }
            for r in reports
        ],
    }


def write_summary(path: Path, values: dict[str, Any]) -> None:
    """Write `summary.json`."""
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

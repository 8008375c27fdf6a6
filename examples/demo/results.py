"""What the steps were and what they gave: lines, tables, numbers for summary.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_dynbatch.report import StepReport
from megatron_dynbatch.wording import counted

_ROWS_SHOWN = 24


def warm_up_line(report: StepReport, num_steps: int) -> str:
    """One line about a supervised step that just ran."""
    return f"warm-up {_sizes(report, num_steps)}  loss {report.metrics['lm loss']:.3f}"


def policy_line(report: StepReport, reward: float, num_steps: int) -> str:
    """One line about a step of reinforcement learning that just ran."""
    clipped = report.metrics["clip_fraction"]
    return f"step {_sizes(report, num_steps)}  reward {reward:.3f}  clipped {clipped:.1%}"


def _sizes(report: StepReport, num_steps: int) -> str:
    return (
        f"{report.iteration:>3}/{num_steps}  "
        f"{counted(report.step_global_batch_size, 'rollout'):>11}  "
        f"{counted(report.num_samples, 'sample'):>11}  "
        f"{counted(report.num_microbatches, 'micro-batch'):<15}  "
        f"lr {report.learning_rate or 0:.1e}"
    )


def step_rows(
    reports: Sequence[StepReport],
    episodes: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The numbers of each step, as summary.json has them.

    Args:
        reports: One per step.
        episodes: One per batch of rollouts.
    """
    by_batch = {line["batch_id"]: line for line in episodes}
    return [
        {
            "iteration": r.iteration,
            "batch_id": r.batch_id,
            "reward": by_batch[r.batch_id]["reward"],
            "solved_at_once": by_batch[r.batch_id]["solved_at_once"],
            "G": r.step_global_batch_size,
            "samples": r.num_samples,
            "M": r.num_microbatches,
            "M_bound": r.fewest_microbatches,
            "dummies": r.num_dummies,
            "tokens": r.num_tokens,
            "trained_tokens": r.num_trained_tokens,
            "fill": r.fill,
            "loss": r.metrics["loss"],
            "clip_fraction": r.metrics["clip_fraction"],
            "kl": r.metrics["approx_kl"],
            "grad_norm": r.grad_norm,
            "learning_rate": r.learning_rate,
            "consumed_rollouts": r.consumed_rollouts,
        }
        for r in reports
    ]


def rise(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean reward of the first and of the last fifth of the steps."""
    fifth = max(1, len(rows) // 5)
    rewards = [row["reward"] for row in rows]
    return sum(rewards[:fifth]) / fifth, sum(rewards[-fifth:]) / fifth


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Steps in even distances, at most some two dozen of them."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=f"Steps (all {len(rows)} are in summary.json)",
        title_justify="left",
        caption="G: rollouts; M: micro-batches per rank / least possible",
        caption_justify="left",
    )
    for heading in (
        "step", "reward", "G", "samples", "M", "tokens", "fill", "loss", "clip", "KL", "LR",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:: max(1, math.ceil(len(rows) / _ROWS_SHOWN))]:
        table.add_row(
            str(row["iteration"]), f"{row['reward']:.2f}", str(row["G"]), str(row["samples"]),
            f"{row['M']}/{row['M_bound']}", f"{row['tokens']:,}", f"{row['fill']:.0%}",
            f"{row['loss']:.3f}", f"{row['clip_fraction']:.0%}", f"{row['kl']:.3f}",
            f"{row['learning_rate']:.1e}",
        )  # fmt: skip
    Console().print(table)

"""The pictures of the demo: rewards, sizes and fill of the steps; when what was generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dynbatch.cli.report_charts import (
    BLUE,
    ORANGE,
    Curve,
    draw_curves,
    draw_fill,
    draw_sizes,
    saved,
)
from megatron_dynbatch.report import StepReport

TITLE = "Reinforcement learning with a global batch per step"


def draw_steps(rewards: Mapping[int, Curve], reports: Sequence[StepReport], path: Path) -> None:
    """Draw the reward of every seed, and the sizes and fill of the first seed's steps.

    Args:
        rewards: Seed → iterations and mean rewards.
        reports: Of the steps of the first seed.
        path: PNG to write.
    """
    with saved(path, (9, 7.4)) as figure:
        axes = figure.subplots(3, 1, sharex=True, height_ratios=(1.25, 1, 0.8))
        figure.suptitle(TITLE, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        draw_curves(
            axes[0],
            "Mean reward of the batch of rollouts that the step trains on",
            {f"seed {seed}": curve for seed, curve in rewards.items()},
        )
        axes[0].set_ylim(0, 1)
        draw_sizes(axes[1], reports)
        draw_fill(axes[2], reports)
        axes[2].set_xlabel("training step")
        axes[2].set_xlim(0.3, len(reports) + 0.7)


def draw_timeline(arms: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw when each batch was generated and trained.

    Args:
        arms: Name → rows of an arm's ledger (`asynchronous.LedgerRow` as a mapping).
        path: PNG to write.
    """
    with saved(path, (9, 1.1 + 1.4 * len(arms)), grid="") as figure:
        axes = figure.subplots(len(arms), 1, sharex=True, squeeze=False)[:, 0]
        for own, (name, rows) in zip(axes, arms.items(), strict=True):
            for height, (kind, colour) in enumerate((("trained", BLUE), ("generated", ORANGE))):
                spans = [(row[kind][0], row[kind][1] - row[kind][0]) for row in rows]
                own.broken_barh(spans, (height - 0.4, 0.8), color=colour, edgecolor="white")
            own.set_yticks((0, 1), ("training", "generation"))
            own.set_title(f"{name}: every bar is a batch")
        axes[-1].set_xlabel("seconds from the first generation")

"""The picture of the demo: reward of every seed, sizes and fill of the steps of the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dynbatch.cli.report_charts import Curve, draw_curves, draw_fill, draw_sizes, saved
from megatron_dynbatch.report import StepReport

TITLE = "Reinforcement learning with a global batch per step"


def draw_steps(
    rewards: Mapping[int, Curve], reports: Sequence[StepReport], path: Path
) -> None:
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

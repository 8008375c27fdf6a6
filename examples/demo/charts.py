"""The picture of a run: loss, sizes and fill of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from examples.demo.results import LOSS  # noqa: E402
from megatron_dynbatch.report import StepReport  # noqa: E402

INK, BLUE, LIGHT, ORANGE, GREY = "#222222", "#1f5fa8", "#a9c8e8", "#d9711c", "#8a8a8a"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw_steps(reports: Sequence[StepReport], title: str, path: Path) -> None:
    """Draw loss, step sizes, micro-batches and fill over the steps into a PNG."""
    steps = [r.iteration for r in reports]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(3, 1, figsize=(9, 7.2), sharex=True, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold")
        _loss(axes[0], steps, reports)
        _sizes(axes[1], steps, reports)
        _fill(axes[2], steps, reports)
        axes[2].set_xlabel("training step")
        axes[2].set_xlim(0.3, len(steps) + 0.7)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _loss(axes: Axes, steps: Sequence[int], reports: Sequence[StepReport]) -> None:
    axes.plot(steps, [r.metrics[LOSS] for r in reports], color=BLUE, lw=1.8, marker="o", ms=3)
    axes.set_title("Loss: mean over the rollouts of the step")
    axes.set_ylim(bottom=0)


def _sizes(axes: Axes, steps: Sequence[int], reports: Sequence[StepReport]) -> None:
    samples = [r.num_samples for r in reports]
    rollouts = [r.step_global_batch_size for r in reports]
    axes.bar(steps, samples, color=LIGHT, width=0.8, label="samples")
    axes.bar(steps, rollouts, color=BLUE, width=0.8, label="rollouts (the global batch size)")
    axes.set_title("Size of each step")
    axes.legend(loc="upper right", ncols=2, bbox_to_anchor=(1, 1.17))


def _fill(axes: Axes, steps: Sequence[int], reports: Sequence[StepReport]) -> None:
    axes.bar(steps, [100 * r.fill for r in reports], color=ORANGE, width=0.8)
    axes.set_title("Fill: tokens of the samples, per cent of what the micro-batches hold")
    axes.set_ylim(0, 100)
    for step, report in zip(steps, reports, strict=True):
        axes.text(
            step, 3, str(report.num_microbatches), ha="center", color="white", fontsize=8.5,
            fontweight="bold",
        )  # fmt: skip
    axes.text(
        1, 1.04, "in each bar: micro-batches per rank", transform=axes.transAxes, ha="right",
        color=GREY, fontsize=9,
    )  # fmt: skip

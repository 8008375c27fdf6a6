"""The pictures: reward, sizes and fill of the steps; the plan of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np  # noqa: E402
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from megatron_dynbatch.plan import Plan  # noqa: E402

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
_SMOOTHING = 8

Rows = Sequence[Mapping[str, Any]]


def draw_steps(seeds: Mapping[int, Rows], path: Path) -> None:
    """Draw the reward of every seed, and the sizes and fill of the first seed's steps.

    Args:
        seeds: Seed → rows of `results.step_rows`.
        path: PNG to write.
    """
    first = next(iter(seeds.values()))
    steps = [row["iteration"] for row in first]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            3, 1, figsize=(9, 7.4), sharex=True, layout="constrained", height_ratios=(1.25, 1, 0.8)
        )
        figure.suptitle(
            "Reinforcement learning with a global batch per step",
            x=0.01, ha="left", fontsize=12.5, fontweight="bold",
        )  # fmt: skip
        _reward(axes[0], seeds)
        _sizes(axes[1], steps, first)
        _fill(axes[2], steps, first)
        axes[2].set_xlabel("training step")
        axes[2].set_xlim(0.3, len(steps) + 0.7)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _reward(axes: Axes, seeds: Mapping[int, Rows]) -> None:
    axes.set_title("Mean reward of the batch of rollouts that the step trains on")
    for number, (seed, rows) in enumerate(seeds.items()):
        steps = [row["iteration"] for row in rows]
        rewards = np.array([row["reward"] for row in rows])
        color = (BLUE, ORANGE, GREY)[number % 3]
        axes.plot(steps, rewards, color=color, lw=0.8, alpha=0.35)
        axes.plot(steps, _smooth(rewards), color=color, lw=2.2, label=f"seed {seed}")
    axes.set_ylim(0, 1)
    if len(seeds) > 1:
        axes.legend(loc="upper left", ncols=len(seeds))


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean of the last few values."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - _SMOOTHING)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _sizes(axes: Axes, steps: Sequence[int], rows: Rows) -> None:
    axes.bar(steps, [r["samples"] for r in rows], color=LIGHT, width=0.85, label="samples")
    axes.bar(
        steps, [r["G"] for r in rows], color=BLUE, width=0.85,
        label="rollouts (the global batch size)",
    )  # fmt: skip
    axes.set_title("Size of each step")
    axes.set_ylim(top=1.12 * max(r["samples"] for r in rows))
    axes.legend(loc="upper right", ncols=2, bbox_to_anchor=(1, 1.2))


def _fill(axes: Axes, steps: Sequence[int], rows: Rows) -> None:
    counts = np.array([r["M"] for r in rows])
    shades = {
        m: 0.35 + 0.65 * k / max(1, len(set(counts)) - 1) for k, m in enumerate(sorted(set(counts)))
    }
    for count, shade in shades.items():
        here = [k for k, r in enumerate(rows) if r["M"] == count]
        axes.bar(
            [steps[k] for k in here], [100 * rows[k]["fill"] for k in here], width=0.85,
            color=ORANGE, alpha=shade, label=str(count),
        )  # fmt: skip
    axes.set_title("Fill of the micro-batches with tokens, per cent")
    axes.set_ylim(0, 100)
    axes.legend(
        loc="upper right", ncols=len(shades), bbox_to_anchor=(1, 1.3), title=None,
        handlelength=1.0, columnspacing=1.0,
    )  # fmt: skip
    axes.text(
        1 - 0.062 * len(shades), 1.11, "micro-batches per rank:", transform=axes.transAxes,
        ha="right", fontsize=9, color=GREY,
    )  # fmt: skip


def draw_plan(plan: Plan, step_index: int, path: Path) -> None:
    """Draw which sample runs where in one step: a bar per sample, as long as its tokens.

    Args:
        plan: Plan of the batch.
        step_index: Which step.
        path: PNG to write.
    """
    step = plan.steps[step_index]
    rollouts = plan.index.rollout_indices
    own_number = {int(r): k for k, r in enumerate(np.unique(rollouts[step.samples]))}
    colors = plt.get_cmap("tab20")
    bars = [
        (f"rank {rank}, micro-batch {k + 1}", rows)
        for rank, own in enumerate(step.micro_batches)
        for k, rows in enumerate(own)
    ]
    capacity = plan.options.capacity(plan.layout)
    assert capacity is not None
    with plt.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = plt.subplots(figsize=(9, 0.9 + 0.42 * len(bars)), layout="constrained")
        for row, (_, samples) in enumerate(bars):
            start = 0
            for sample in samples:
                length = int(plan.index.total_lengths[sample])
                number = own_number[int(rollouts[sample])]
                axes.barh(
                    row, length, left=start, height=0.7, edgecolor="white", linewidth=1.0,
                    color=colors(number % 20),
                )  # fmt: skip
                axes.text(
                    start + length / 2, row, str(number + 1), ha="center", va="center", fontsize=7
                )
                start += length
        axes.axvline(capacity, color=INK, lw=1.2, ls="--")
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
        axes.invert_yaxis()
        axes.set_xlim(0, capacity * 1.02)
        axes.set_xlabel("tokens (dashed: what a micro-batch may hold)")
        axes.set_title(
            f"{step.step_global_batch_size} rollouts, {step.num_samples} samples; "
            "the numbers are the rollouts'"
        )
        figure.savefig(path, dpi=110)
        plt.close(figure)

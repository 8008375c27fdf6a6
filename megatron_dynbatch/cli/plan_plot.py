"""A step of a plan as a picture: ranks × time, micro-batches as blocks coloured by cost."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, Formatter, ScalarFormatter
from numpy.typing import NDArray

from megatron_dynbatch.plan import Plan
from megatron_dynbatch.plan.step_time import pass_times
from megatron_dynbatch.plan.summary import StepSummary, micro_batch_costs
from megatron_dynbatch.wording import counted

MOST_LINES = 48
# The ends of the scale are too pale and too dark to see edges on.
COLOURS = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.2, 0.8, 256)))
IDLE = "#f1efec"
# One block: line, start, width, cost of its micro-batch, is it a backward pass, is it a dummy.
Block = tuple[int, float, float, float, bool, bool]


def draw_step(
    plan: Plan, summary: StepSummary, path: Path, name: str | None = None, width: float = 11.0
) -> None:
    """Write the picture of one step.

    Without pipeline parallelism a line is a DP rank; with it, a pipeline stage of a DP rank,
    the most loaded rank first. At most 48 lines are drawn.

    Args:
        plan: The plan.
        summary: Figures of the step, its number among them.
        path: PNG (or any format that matplotlib knows by its ending).
        name: What the title calls the step; default: its number in the plan.
        width: Inches.
    """
    step = plan.steps[summary.step]
    costs = micro_batch_costs(plan, step)
    is_dummy = np.array([[not rows for rows in rank] for rank in step.micro_batches])
    if plan.layout.pp == 1:
        labels, blocks = _rank_blocks(costs, is_dummy, plan.layout.lockstep_ranks)
    else:
        labels, blocks = _stage_blocks(plan, costs, is_dummy)
    figure = Figure(figsize=(width, 1.9 + 0.24 * max(4, len(labels))), layout="constrained")
    axes = figure.subplots()
    norm = Normalize(0, float(costs.max()))
    _draw_blocks(axes, blocks, norm)
    axes.set_xlim(0, summary.seconds)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    passes = "" if plan.layout.pp == 1 else "; thin: forward, thick: backward"
    label = f"predicted time, in units of the cost model{passes}"
    axes.set_xlabel(textwrap.fill(label, max(24, int(width * 9))))
    axes.xaxis.set_major_formatter(number_format(summary.seconds))
    axes.set_facecolor(IDLE)
    title = _title(plan, summary, name or f"Step {summary.step}")
    lines = [textwrap.fill(line, max(24, int(width * 12))) for line in title.splitlines()]
    axes.set_title("\n".join(lines), loc="left", fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    number = number_format(float(costs.max()))
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=axes, pad=0.01, format=number)
    bar.set_label("cost of the micro-batch", fontsize=9)
    bar.outline.set_visible(False)
    figure.savefig(path, dpi=150)


def number_format(largest: float) -> Formatter:
    """How an axis writes its numbers: 12M rather than 1.2 and, somewhere else, a power of ten."""
    return EngFormatter(sep="") if largest >= 10_000 else ScalarFormatter()


def _title(plan: Plan, summary: StepSummary, name: str) -> str:
    layout = plan.layout
    sizes = ", ".join(
        f"{name.upper()} {getattr(layout, name)}"
        for name in ("dp", "cp", "tp", "pp", "vpp", "ep")
        if getattr(layout, name) > 1
    )
    return (
        f"{name}: {counted(summary.num_rollouts, 'rollout')}, "
        f"{counted(summary.num_samples, 'sample')}, "
        f"{counted(summary.num_tokens, 'token')} on {sizes or 'one rank'}\n"
        f"{counted(summary.num_microbatches, 'micro-batch')} per rank (bound "
        f"{summary.fewest_microbatches}), {counted(summary.num_dummies, 'dummy')}, balance "
        f"{summary.balance:.4f}, lock-step {summary.lockstep:.4f}, idle {summary.bubble:.1%}"
    )


def _rank_blocks(
    costs: NDArray[np.float64], is_dummy: NDArray[np.bool_], group: int
) -> tuple[list[str], list[Block]]:
    """Blocks of DP ranks; the k-th of a lock-step group start together."""
    starts = np.zeros_like(costs)
    for first in range(0, len(costs), group):
        slowest = costs[first : first + group].max(axis=0)
        starts[first : first + group, 1:] = np.cumsum(slowest)[:-1]
    num = min(len(costs), MOST_LINES)
    labels = [f"DP {rank}" for rank in range(num)]
    blocks = [
        (rank, float(starts[rank, k]), float(cost), float(cost), False, bool(is_dummy[rank, k]))
        for rank in range(num)
        for k, cost in enumerate(costs[rank])
    ]
    return labels, blocks


def _stage_blocks(
    plan: Plan, costs: NDArray[np.float64], is_dummy: NDArray[np.bool_]
) -> tuple[list[str], list[Block]]:
    """Blocks of pipeline stages, most loaded DP ranks first."""
    layout = plan.layout
    durations = costs.copy()
    for first in range(0, len(costs), layout.lockstep_ranks):
        group = slice(first, first + layout.lockstep_ranks)
        durations[group] = durations[group].max(axis=0)
    by_load = np.argsort(-durations.sum(axis=1), kind="stable")
    ranks = by_load[: max(1, MOST_LINES // layout.pp)].tolist()
    starts, ends = pass_times(durations[ranks], layout)
    labels = [f"DP {rank} stage {stage}" for rank in ranks for stage in range(layout.pp)]
    blocks: list[Block] = []
    for (stage, item), start in starts.items():
        for place, rank in enumerate(ranks):
            k = item.micro_batch
            begin, end = float(start[place]), float(ends[stage, item][place])
            blocks.append(
                (
                    place * layout.pp + stage,
                    begin,
                    end - begin,
                    float(costs[rank, k]),
                    not item.is_forward,
                    bool(is_dummy[rank, k]),
                )
            )
    return labels, blocks


def _draw_blocks(axes: Any, blocks: list[Block], norm: Normalize) -> None:
    """Forward passes are thinner than backward ones; dummies are empty."""
    has_backward = any(block[4] for block in blocks)
    patches, faces = [], []
    for line, start, width, cost, is_backward, is_dummy in blocks:
        height = 0.84 if is_backward or not has_backward else 0.52
        patches.append(Rectangle((start, line - height / 2), width, height))
        faces.append((1.0, 1.0, 1.0, 1.0) if is_dummy else COLOURS(norm(cost)))
    # Hair lines, so that hundreds of blocks do not turn into a fence.
    width = 0.4 if len(blocks) < 2000 else 0.1
    axes.add_collection(
        PatchCollection(patches, facecolor=faces, edgecolor="#404040", linewidth=width)
    )

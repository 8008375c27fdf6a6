"""Pictures of a run: curves, sizes and fill of the steps, times, and the samples of a plan."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from megatron_dynbatch.cli.plan_plot import number_format
from megatron_dynbatch.plan import Plan
from megatron_dynbatch.report import StepReport
from megatron_dynbatch.wording import counted

INK, BLUE, LIGHT, ORANGE, GREY = "#222222", "#1f5fa8", "#a9c8e8", "#d9711c", "#8a8a8a"
COLOURS = (BLUE, ORANGE, GREY, "#2f8f5b", "#8c4ba3")
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
WIDE, NARROW = 9.0, 4.4  # inches; a narrow picture is for the screen of a phone
_CHARACTER = 0.085  # inches of a title's character
_MOST_BARS = 400

Curve = tuple[Sequence[int], Sequence[float]]
"""Iterations and values."""


@contextmanager
def saved(path: Path, size: tuple[float, float], grid: str = "y") -> Iterator[Figure]:
    """A figure that is written to a PNG at the end.

    Args:
        path: Where to.
        size: Inches.
        grid: Lines across which axes: "y", "both" or "" for none.
    """
    changes: dict[Any, Any] = {"axes.grid": bool(grid), "axes.grid.axis": grid or "y"}
    with matplotlib.rc_context(STYLE | changes):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(path, dpi=130)


def draw_curves(axes: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    """Lines of single values, and thick ones of the mean of the last few."""
    titled(axes, title)
    for number, (label, (steps, values)) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        if len(values) < 3 * _SMOOTHING:  # a mean of the last few would only lag behind
            axes.plot(steps, values, color=colour, lw=1.6, marker="o", ms=4, label=label)
            continue
        axes.plot(steps, values, color=colour, lw=0.8, alpha=0.35)
        axes.plot(steps, smooth(values), color=colour, lw=2.2, label=label)
    if len(curves) > 1:
        axes.legend(loc="best", ncols=len(curves))


def titled(axes: Axes, title: str, beside: float = 0.6) -> None:
    """A title that breaks where the picture is narrow.

    Args:
        axes: Of the picture.
        title: What stands over them.
        beside: Inches beside the axes, which their ticks' labels take.
    """
    axes.set_title(broken(axes, title, beside))


def broken(axes: Axes, text: str, beside: float = 0.6) -> str:
    """A text in lines that are no wider than the axes."""
    room = axes.figure.get_figwidth() - beside  # type: ignore[union-attr]
    return textwrap.fill(text, max(20, int(room / _CHARACTER)))


def _legend(axes: Axes) -> None:
    if axes.figure.get_figwidth() < WIDE / 2:  # type: ignore[union-attr]
        axes.legend(loc="best", fontsize=8)
    else:
        axes.legend(loc="lower right", ncols=2, bbox_to_anchor=(1.01, 0.97))


def smooth(values: ArrayLike) -> NDArray[np.float64]:
    """Mean of each value and the few before it."""
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, np.float64)]))
    ends = np.arange(1, sums.size)
    starts = np.maximum(0, ends - _SMOOTHING)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def draw_sizes(axes: Axes, reports: Sequence[StepReport]) -> None:
    """Samples and rollouts of each step."""
    steps = [r.iteration for r in reports]
    _bars(axes, steps, [r.num_samples for r in reports], LIGHT, "samples")
    _bars(
        axes, steps, [r.step_global_batch_size for r in reports], BLUE,
        "rollouts (the global batch size)",
    )  # fmt: skip
    titled(axes, "Size of each step")
    axes.set_ylim(0, 1.12 * max(r.num_samples for r in reports))
    _legend(axes)


def draw_fill(axes: Axes, reports: Sequence[StepReport]) -> None:
    """How full the micro-batches are, and how many a rank has beyond the fewest possible."""
    steps = [r.iteration for r in reports]
    extra = [r.num_microbatches - (r.fewest_microbatches or r.num_microbatches) for r in reports]
    for is_extra, colour, label in (
        (False, ORANGE, "as few as possible"),
        (True, "#8f3d00", "more than the fewest possible"),
    ):
        height = [
            100 * r.fill if (more > 0) == is_extra else 0.0
            for r, more in zip(reports, extra, strict=True)
        ]
        if any(height):
            _bars(axes, steps, height, colour, label)
    titled(axes, "How full the micro-batches are, per cent")
    axes.set_ylim(0, 100)
    _legend(axes)


def _bars(
    axes: Axes, steps: Sequence[int], heights: Sequence[float], colour: str, label: str
) -> None:
    if len(steps) <= _MOST_BARS:
        axes.bar(steps, heights, color=colour, width=0.85, label=label)
    else:  # bars thinner than a pixel would only blur
        axes.fill_between(steps, heights, color=colour, step="mid", lw=0, label=label)


def draw_history(
    path: Path,
    reports: Sequence[StepReport],
    curves: Mapping[str, Curve],
    width: float = WIDE,
) -> None:
    """Write the history of a run.

    Args:
        path: PNG.
        reports: Of its steps.
        curves: Title → curve, drawn above sizes and fill.
        width: Inches.
    """
    rows = len(curves) + 2
    with saved(path, (width, 0.9 + 2.1 * rows)) as figure:
        axes = figure.subplots(rows, 1, sharex=True)
        for place, (title, curve) in zip(axes, curves.items(), strict=False):
            draw_curves(place, title, {"": curve})
        draw_sizes(axes[-2], reports)
        draw_fill(axes[-1], reports)
        axes[-1].set_xlabel("training step")
        axes[-1].set_xlim(reports[0].iteration - 0.7, reports[-1].iteration + 0.7)
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))


def robust_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Intercept and slope that a few slow steps do not tilt (Theil and Sen: median of slopes).

    No step takes less than nothing: where the line would begin below 0 it begins at 0.
    """
    chosen = np.unique(np.linspace(0, x.size - 1, 400).astype(int))
    run = x[chosen] - x[chosen, None]
    rise = y[chosen] - y[chosen, None]
    far = np.abs(run) > 1e-9 * np.abs(x).max()
    slope = max(0.0, float(np.median(rise[far] / run[far]))) if far.any() else 0.0
    start = float(np.median(y - slope * x))
    return (start, slope) if start >= 0 else (0.0, float(np.median(y / x)))


def draw_times(path: Path, predicted: ArrayLike, measured: ArrayLike, width: float = 6.2) -> float:
    """Write measured against predicted times of steps.

    Args:
        path: PNG.
        predicted: [n] by the cost model, in its unit.
        measured: [n] seconds, waiting for rollouts taken off.
        width: Inches.

    Returns:
        Median relative deviation from the line drawn.
    """
    x, y = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
    start, slope = robust_line(x, y)
    deviation = float(np.median(np.abs(y - start - slope * x) / y))
    with saved(path, (width, 4.6), grid="both") as figure:
        axes = figure.subplots()
        axes.scatter(x, y, s=16, color=BLUE, alpha=0.6, linewidths=0)
        reach = np.array([0.0, x.max() * 1.05])
        label = f"{start:.3g} s + " * (start > 0) + f"{slope:.3g} s · predicted"
        axes.plot(reach, start + slope * reach, color=ORANGE, lw=1.5, label=label)
        axes.set_xlim(0, reach[1])
        # A few steps with start-up or checkpoint in them would squash all others.
        top = max(float(np.quantile(y, 0.98)), start + slope * float(x.max())) * 1.15
        hidden = int((y > top).sum())
        axes.set_ylim(0.0, top)
        axes.xaxis.set_major_formatter(number_format(float(x.max())))
        axes.set_xlabel(broken(axes, "predicted time, in units of the cost model"))
        axes.set_ylabel("measured seconds, without waiting")
        titled(axes, f"Step times: half of them within {deviation:.0%} of the line")
        if hidden:
            axes.annotate(
                f"{hidden} above", (0.99, 0.97), xycoords="axes fraction", ha="right", va="top",
                color=GREY, fontsize=9,
            )  # fmt: skip
        axes.legend(loc="upper left")
    return deviation


def draw_samples(plan: Plan, step_index: int, path: Path, width: float = WIDE) -> None:
    """Write which sample runs where in one step: a bar per sample, as long as its tokens.

    Args:
        plan: Plan of the batch.
        step_index: Which step.
        path: PNG.
        width: Inches.
    """
    step = plan.steps[step_index]
    rollouts = plan.index.rollout_indices
    own_number = {int(r): k for k, r in enumerate(np.unique(rollouts[step.samples]))}
    colours = matplotlib.colormaps["tab20"]
    lines = [
        (f"DP {rank}, micro-batch {k + 1}", rows)
        for rank, own in enumerate(step.micro_batches)
        for k, rows in enumerate(own)
    ]
    capacity = plan.options.capacity(plan.layout)
    with saved(path, (width, 0.9 + 0.42 * len(lines)), grid="") as figure:
        axes = figure.subplots()
        for line, (_, samples) in enumerate(lines):
            start = 0
            for sample in samples:
                length = int(plan.index.total_lengths[sample])
                number = own_number[int(rollouts[sample])]
                axes.barh(
                    line, length, left=start, height=0.7, edgecolor="white", linewidth=1.0,
                    color=colours(number % 20),
                )  # fmt: skip
                axes.text(
                    start + length / 2, line, str(number + 1), ha="center", va="center", fontsize=7,
                    color=ink_on(colours(number % 20)),
                )  # fmt: skip
                start += length
        if capacity is not None:
            axes.axvline(capacity, color=INK, lw=1.2, ls="--")
            axes.set_xlim(0, capacity * 1.02)
        axes.set_yticks(range(len(lines)), [name for name, _ in lines])
        axes.invert_yaxis()
        axes.set_xlabel(broken(axes, "tokens (dashed: what a micro-batch may hold)", 1.6))
        titled(
            axes,
            f"{counted(step.step_global_batch_size, 'rollout')}, "
            f"{counted(step.num_samples, 'sample')}; the numbers are the rollouts'",
            1.6,
        )


def ink_on(colour: tuple[float, float, float, float]) -> str:
    """Black or white, whichever is read more easily on a colour."""
    red, green, blue = colour[:3]
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"

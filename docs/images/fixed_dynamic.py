"""``python docs/images/fixed_dynamic.py``: the picture of the README, a fixed batch beside a plan.

The same ten rollouts on two data-parallel ranks. Above, steps of twelve samples in micro-batches of
two, each padded to its longest; below, the plan that this package makes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.cli.report_charts import GREY, INK, saved
from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.rollouts import SampleIndex

CAP, FIXED, RANKS, PER_MICRO_BATCH = 64, 12, 2, 2
LENGTHS = {
    0: [22, 9], 1: [40], 2: [12, 18, 7], 3: [5], 4: [30, 11], 5: [16, 16, 9, 24], 6: [8],
    7: [51], 8: [14, 6], 9: [20],
}  # fmt: skip
Line = list[int]


def batch() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths and rollouts of the samples, in order."""
    pairs = [(length, rollout) for rollout, own in LENGTHS.items() for length in own]
    lengths, rollouts = zip(*pairs, strict=True)
    return np.array(lengths), np.array(rollouts)


def draw(
    axes: Any, steps: dict[str, list[Line]], lengths: NDArray[np.int64], *, padded: bool
) -> None:
    """A line per micro-batch; grey is padding, and what is dropped is pale."""
    colours = matplotlib.colormaps["tab10"]
    rollouts = batch()[1]
    y = 0.0
    for name, lines in steps.items():
        top = y
        alpha = 0.3 if name == "dropped" else 1.0
        for line in lines:
            start, slot = 0, int(lengths[line].max())
            if padded and name != "dropped":
                axes.barh(y, slot * len(line), height=0.8, color="#e3e3e3", linewidth=0)
            for sample in line:
                length, rollout = int(lengths[sample]), int(rollouts[sample])
                colour = colours(rollout)
                axes.barh(y, length, left=start, height=0.8, color=colour, ec="white", alpha=alpha)
                axes.text(start + length / 2, y, "ABCDEFGHIJ"[rollout], ha="center", va="center",
                          color="white", fontsize=8, fontweight="bold")  # fmt: skip
                start += slot if padded and name != "dropped" else length
            y += 1
        axes.text(-2, (top + y - 1) / 2, name, ha="right", va="center", fontsize=9)
        y += 0.6
    axes.set_ylim(y - 0.9, -0.7)
    axes.set_xlim(0, 104)
    axes.set_yticks([])
    axes.set_xticks([])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def fixed_steps(lengths: NDArray[np.int64]) -> dict[str, list[Line]]:
    """Steps of FIXED samples in order, and what is left."""
    rows = list(range(lengths.size))
    whole = lengths.size // FIXED * FIXED
    steps = {
        f"step {1 + s // FIXED}": [
            rows[k : k + PER_MICRO_BATCH] for k in range(s, s + FIXED, PER_MICRO_BATCH)
        ]
        for s in range(0, whole, FIXED)
    }
    return {**steps, "dropped": [rows[k : k + 4] for k in range(whole, lengths.size, 4)]}


def main() -> None:
    """Write fixed-dynamic.png beside this file."""
    lengths, rollouts = batch()
    absent = np.full(lengths.size, -1, dtype=np.int64)
    index = SampleIndex(lengths, lengths, lengths, rollouts, absent)
    options = PlanOptions(max_tokens_per_gpu=CAP, rollouts_per_step=5)
    plan = make_plan(index, ParallelLayout(dp=RANKS), options)
    fixed = fixed_steps(lengths)
    planned = {
        f"step {1 + number}": [list(rows) for rank in step.micro_batches for rows in rank]
        for number, step in enumerate(plan.steps)
    }
    trained = [line for name, lines in fixed.items() if name != "dropped" for line in lines]
    computed = sum(len(line) * int(lengths[line].max()) for line in trained)
    padding = 1 - sum(int(lengths[line].sum()) for line in trained) / computed
    rest = lengths.size % FIXED
    torn = [r for r in LENGTHS if len({*np.flatnonzero(rollouts == r) // FIXED}) > 1]
    with saved(Path(__file__).with_name("fixed-dynamic.png"), (8.4, 6.8), grid="") as figure:
        heights = [sum(map(len, steps.values())) + 0.6 * len(steps) for steps in (fixed, planned)]
        above, below = figure.subplots(2, 1, height_ratios=heights)
        draw(above, fixed, lengths, padded=True)
        above.set_title(
            f"Fixed global batch of {FIXED} samples: {padding:.0%} of what is computed is padding, "
            f"\n{rest} of {lengths.size} samples never train, rollout "
            f"{', '.join('ABCDEFGHIJ'[r] for r in torn)} trains in part"
        )
        draw(below, planned, lengths, padded=False)
        below.axvline(CAP, color=INK, lw=1, ls="--")
        below.set_title(
            f"Planned: steps of whole rollouts, packed up to a cap of {CAP} tokens; "
            "every sample trains"
        )
        figure.supxlabel(
            "a line is a micro-batch, a letter a rollout, grey is padding",
            x=0.09, ha="left", fontsize=8, color=GREY,
        )  # fmt: skip


if __name__ == "__main__":
    main()

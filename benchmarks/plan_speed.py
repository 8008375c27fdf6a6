"""Planning time against the number of samples and of ranks, one core, with a plot.

    python -m benchmarks.plan_speed --out runs/plan_speed
    python -m benchmarks.plan_speed --results benchmarks/results/plan_speed.md

Times `make_plan` as a user calls it: validation, steps, packing, placement, search, the plan.
CPU seconds of the process, the best of a few runs; peak memory of the largest beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.plan.distributions import DISTRIBUTIONS, draw_lengths
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.limits import MAX_BATCH_ROWS

# (samples, dp) and the seconds that planning may take.
BAR = {
    (4096, 8): 0.05,
    (4096, 128): 0.05,
    (65536, 8): 1.0,
    (65536, 128): 1.0,
    (MAX_BATCH_ROWS, 1024): 10.0,
}
SWEEP_SIZES = (256, 1024, 4096, 16384, 65536, 262144)
SWEEP_DP = (1, 4, 8, 32, 128, 512)


def plan_seconds(distribution: str, num_samples: int, dp: int, repeats: int) -> float:
    """CPU seconds of one plan, the best of `repeats`."""
    lengths = draw_lengths(distribution, num_samples, seed=0)
    absent = np.full(num_samples, -1)
    layout = ParallelLayout(dp=dp)
    options = PlanOptions(max_tokens_per_gpu=DISTRIBUTIONS[distribution].capacity)
    best = float("inf")
    for _ in range(repeats):
        index = SampleIndex(lengths, lengths, lengths, absent, absent)
        start = time.process_time()
        make_plan(index, layout, options)
        best = min(best, time.process_time() - start)
    return best


def run_bar(distributions: str, most_samples: int) -> tuple[list[dict[str, object]], bool]:
    """The sizes with a bar, on every distribution."""
    rows: list[dict[str, object]] = []
    met = True
    print(f"{'samples':>9} {'dp':>5}  " + " ".join(f"{name:>8}" for name in distributions))
    for (num_samples, dp), limit in BAR.items():
        if num_samples > most_samples:
            continue
        times = [
            plan_seconds(name, num_samples, dp, 1 if num_samples > 100_000 else 5)
            for name in distributions
        ]
        met &= max(times) <= limit
        shown = " ".join(f"{seconds:8.3f}" for seconds in times)
        print(f"{num_samples:>9} {dp:>5}  {shown}   bar {limit} s", flush=True)
        rows += [
            {"distribution": name, "num_samples": num_samples, "dp": dp, "seconds": seconds}
            for name, seconds in zip(distributions, times, strict=True)
        ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.2f} GiB; {'bar met' if met else 'bar missed'}")
    return rows, met


def as_table(rows: list[dict[str, object]], distributions: str) -> str:
    """The file of results, which `readme_numbers` reads."""
    lines = [
        "# Planning time", "",
        "Written by `python -m benchmarks.plan_speed --results`: CPU seconds of `make_plan` on one",
        "core of a machine with 2, the best of five plans (one above 100,000 samples), for the",
        "named sets of lengths A to G. "
        f"The machine's load was {os.getloadavg()[1]:.1f} in the last five minutes"
        + ("." if os.getloadavg()[1] < 1.5 else ": other work makes these times longer."), "",
        "| samples | DP ranks | " + " | ".join(distributions) + " | bar |",
        "|---|---|" + "---|" * (len(distributions) + 1),
    ]  # fmt: skip
    for (num_samples, dp), limit in BAR.items():
        own = {row["distribution"]: row["seconds"] for row in rows
               if (row["num_samples"], row["dp"]) == (num_samples, dp)}  # fmt: skip
        if own:
            seconds = " | ".join(f"{own[name]:.3f}" for name in distributions)
            lines.append(f"| {num_samples:,} | {dp} | {seconds} | {limit} |")
    return "\n".join(lines) + "\n"


def plot(path: Path, distributions: str) -> None:
    """Time against n at dp 8, and against dp at n 16384."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in distributions:
        times = [plan_seconds(name, size, 8, 2) for size in SWEEP_SIZES]
        left.loglog(SWEEP_SIZES, times, marker="o", markersize=3, label=name)
        times = [plan_seconds(name, 16384, dp, 2) for dp in SWEEP_DP]
        right.loglog(SWEEP_DP, times, marker="o", markersize=3, label=name)
    guide = [size * np.log2(size) * 4e-7 for size in SWEEP_SIZES]
    left.loglog(SWEEP_SIZES, guide, color="grey", linestyle=":", label="n log n")
    left.set_xlabel("samples in a step, dp 8")
    right.set_xlabel("DP ranks, 16384 samples")
    left.set_ylabel("planning time, CPU seconds")
    left.legend(fontsize=7, ncols=2)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for plan_speed.json and plan_speed.png")
    parser.add_argument("--results", type=Path, metavar="MD", help="write the table to a file")
    parser.add_argument("--distributions", default="".join(DISTRIBUTIONS))
    parser.add_argument("--most-samples", type=int, default=MAX_BATCH_ROWS, help="none larger")
    args = parser.parse_args()
    rows, met = run_bar(args.distributions, args.most_samples)
    if args.results:
        args.results.write_text(as_table(rows, args.distributions), encoding="utf-8")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "plan_speed.json").write_text(json.dumps(rows, indent=1))
        plot(args.out / "plan_speed.png", args.distributions)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

"""Every guarantee and the balance bar, over all named distributions, sizes and layouts.

    python -m benchmarks.plan_suite --num-samples 256 4096 65536

Distributions A to G, dp 4 to 128, cp 1, 2 and 8, with and without interleaved pipelines, several
samples per rollout. Each plan is checked; M is compared with the smallest count that no lower
bound rules out; a step of at least 16 samples per rank must balance to 0.5 % of its bound. Where M
is beyond the next count, a stronger bound is computed (`packing_bound`), and M must be the next
count after that or within 0.5 % of it. Exit code 1 if a step does not.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterator

from benchmarks.packing_bound import fractional_bound
from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan, padded_length
from megatron_dynbatch.plan.distributions import DISTRIBUTIONS, draw_lengths, draw_rollout_ids
from megatron_dynbatch.plan.summary import StepSummary, summarize
from megatron_dynbatch.rollouts.index import SampleIndex

BALANCE = 1.005
SAMPLES_PER_RANK = 16
NEAR = 1.005
UNITS = 1200
"""Units of length that a micro-batch holds, for the stronger bound."""


def layouts(sizes: list[int]) -> Iterator[ParallelLayout]:
    """The layouts of the suite."""
    for dp, cp, interleaved in itertools.product(sizes, (1, 2, 8), (False, True)):
        pipeline = {"pp": 2, "vpp": 2, "vpp_group": 4} if interleaved else {}
        yield ParallelLayout(dp=dp, cp=cp, **pipeline)


def plan_one(distribution: str, num_samples: int, layout: ParallelLayout) -> StepSummary:
    """Plan and check one step."""
    lengths = draw_lengths(distribution, num_samples, seed=0)
    rollouts = draw_rollout_ids(num_samples, seed=0)
    index = SampleIndex(lengths, lengths - 1, lengths - 1, rollouts, rollouts // 4)
    cap = DISTRIBUTIONS[distribution].capacity // layout.cp
    plan = make_plan(index, layout, PlanOptions(max_tokens_per_gpu=cap))
    plan.check()
    (figures,) = summarize(plan)
    return figures


@functools.cache
def stronger_fewest(distribution: str, num_samples: int, layout: ParallelLayout) -> int:
    """The smallest M that `fractional_bound` does not rule out."""
    lengths = padded_length(draw_lengths(distribution, num_samples, seed=0), layout)
    capacity = DISTRIBUTIONS[distribution].capacity // layout.cp * layout.cp
    fits = lengths <= capacity
    bound = fractional_bound(lengths[fits], capacity, -(-capacity // UNITS))
    return layout.next_admissible(-(-(bound + int((~fits).sum())) // layout.dp))


def main() -> int:
    """Run the suite, or the part of it that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--distributions", default="".join(DISTRIBUTIONS))
    parser.add_argument("--num-samples", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--dp", type=int, nargs="+", default=[4, 8, 32, 128])
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    worst = 1.0
    for distribution, num_samples in itertools.product(args.distributions, args.num_samples):
        for layout in layouts(args.dp):
            figures = plan_one(distribution, num_samples, layout)
            name = f"{distribution} n {num_samples} {layout}"
            fewest = figures.fewest_microbatches
            following = layout.next_admissible(fewest + 1)
            place = {fewest: "M at the bound", following: "M the next count"}
            counts[place.get(figures.num_microbatches, "M beyond the next count")] += 1
            if figures.num_microbatches > following:
                stronger = stronger_fewest(distribution, num_samples, layout)
                allowed = max(layout.next_admissible(stronger + 1), NEAR * stronger)
                counts["M missed"] += figures.num_microbatches > allowed
                print(
                    f"{name}: M {figures.num_microbatches}, bound {fewest}, by fillings {stronger}",
                    flush=True,
                )
            if num_samples >= SAMPLES_PER_RANK * layout.dp:
                worst = max(worst, figures.balance)
                if figures.balance > BALANCE:
                    counts["balance missed"] += 1
                    print(f"{name}: balance {figures.balance:.4f}")
    print(", ".join(f"{word}: {count}" for word, count in sorted(counts.items())))
    print(f"worst balance of steps with {SAMPLES_PER_RANK} samples per rank: {worst:.4f}")
    return 1 if counts["balance missed"] or counts["M missed"] else 0


if __name__ == "__main__":
    sys.exit(main())

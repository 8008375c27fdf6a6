"""Plans side by side with simple packers and with other projects' own: same draws, one table.

    python -m benchmarks.plan_quality --peers runs/peers --out runs/plan_quality.json

A packer's micro-batches are aligned by cost (k-th dearest of all ranks together) before
lock-step is counted, whatever order it gave them: the best that it could get. Ours is planned
twice: for a layout whose ranks meet at the end of a step (its balance counts) and for one with
expert parallelism over all ranks (its lock-step counts). Exit code 1 if the bar of the table's
last lines is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.plan_baselines import BASELINES, Packer, Ranks, load_peers
from megatron_dynbatch.plan import CostModel, ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.plan.distributions import DISTRIBUTIONS, draw_lengths
from megatron_dynbatch.plan.packing.bounds import makespan_bound, martello_toth_bound
from megatron_dynbatch.rollouts.index import SampleIndex

OURS = "ours"
OURS_LOCKSTEP = "ours, lock-step"
TOLERANCE = 1e-3
# A peer's packer is quadratic or worse: it is not run on larger steps.
MOST_SAMPLES_OF_PEERS = 4096


@dataclass(frozen=True)
class Result:
    """One packer on one instance."""

    packer: str
    distribution: str
    num_samples: int
    dp: int
    seed: int
    num_microbatches: int
    fewest_microbatches: int
    balance: float
    lockstep: float
    over_cap: int
    seconds: float


def measure(
    packer: str, ranks: Ranks, instance: tuple[str, int, int, int], seconds: float
) -> Result:
    """Figures of a packer's answer; raises if a sample is lost or doubled."""
    distribution, num_samples, dp, seed = instance
    lengths = draw_lengths(distribution, num_samples, seed)
    cap = DISTRIBUTIONS[distribution].capacity
    costs = CostModel().sample_costs(lengths).astype(np.int64)
    placed = sorted(i for rank in ranks for mb in rank for i in mb)
    assert placed == list(range(num_samples)), f"{packer} loses or doubles samples"
    grid = np.array([sorted(int(costs[list(mb)].sum()) for mb in rank) for rank in ranks])
    over = sum(int(lengths[list(mb)].sum()) > cap for rank in ranks for mb in rank)
    return Result(
        packer=packer,
        distribution=distribution,
        num_samples=num_samples,
        dp=dp,
        seed=seed,
        num_microbatches=grid.shape[1],
        fewest_microbatches=-(-martello_toth_bound(lengths, cap) // dp),
        balance=int(grid.sum(axis=1).max()) / makespan_bound(costs, dp),
        lockstep=int(grid.max(axis=0).sum()) * dp / int(costs.sum()),
        over_cap=over,
        seconds=seconds,
    )


def run_ours(instance: tuple[str, int, int, int], ep: int, name: str) -> Result:
    """Plan an instance with this package, checked."""
    distribution, num_samples, dp, seed = instance
    lengths = draw_lengths(distribution, num_samples, seed)
    absent = np.full(num_samples, -1)
    index = SampleIndex(lengths, lengths, lengths, absent, absent)
    options = PlanOptions(max_tokens_per_gpu=DISTRIBUTIONS[distribution].capacity)
    start = time.process_time()
    plan = make_plan(index, ParallelLayout(dp=dp, ep=ep), options)
    seconds = time.process_time() - start
    plan.check()
    ranks = [[list(mb) for mb in rank] for rank in plan.steps[0].micro_batches]
    return measure(name, ranks, instance, seconds)


def run_packer(name: str, packer: Packer, instance: tuple[str, int, int, int]) -> Result:
    """Run a baseline or a peer on an instance."""
    distribution, num_samples, dp, seed = instance
    lengths = draw_lengths(distribution, num_samples, seed)
    costs = CostModel().sample_costs(lengths).astype(np.int64).tolist()
    start = time.process_time()
    ranks = packer(lengths.tolist(), costs, dp, DISTRIBUTIONS[distribution].capacity)
    seconds = time.process_time() - start
    listed = [[[int(i) for i in mb] for mb in rank] for rank in ranks]
    return measure(name, listed, instance, seconds)


def print_table(results: list[Result]) -> None:
    """Means over draws, a row per packer, a block per distribution, size and dp."""
    blocks: dict[tuple[str, int, int], dict[str, list[Result]]] = defaultdict(dict)
    for result in results:
        block = blocks[result.distribution, result.num_samples, result.dp]
        block.setdefault(result.packer, []).append(result)
    for (distribution, num_samples, dp), block in blocks.items():
        print(f"\n{distribution}: n {num_samples}, dp {dp}")
        print(
            f"{'':24} {'M':>8} {'bound':>8} {'balance':>8} {'lock-step':>9} {'over':>5} {'ms':>8}"
        )
        for packer, rows in block.items():
            count, fewest, balance, lockstep, seconds = (
                float(np.mean([getattr(row, name) for row in rows]))
                for name in (
                    "num_microbatches",
                    "fewest_microbatches",
                    "balance",
                    "lockstep",
                    "seconds",
                )
            )
            over = sum(row.over_cap > 0 for row in rows)
            print(
                f"{packer:24} {count:8.2f} {fewest:8.2f} {balance:8.4f} {lockstep:9.4f} "
                f"{over:>5} {seconds * 1e3:8.1f}"
            )


def judge(results: list[Result]) -> bool:
    """Print how ours stands against the bar; False where it is missed."""
    by_instance: dict[tuple[str, int, int, int], dict[str, Result]] = defaultdict(dict)
    for row in results:
        by_instance[row.distribution, row.num_samples, row.dp, row.seed][row.packer] = row
    misses: list[str] = []
    num_compared = num_above = num_traded = 0
    for instance, rows in by_instance.items():
        ours, locked = rows[OURS], rows[OURS_LOCKSTEP]
        if ours.over_cap or locked.over_cap:
            misses.append(f"{instance}: cap broken")
        num_above += ours.num_microbatches > ours.fewest_microbatches
        if ours.num_samples >= 16 * ours.dp and ours.balance > 1.005:
            misses.append(f"{instance}: balance {ours.balance:.4f}")
        for name, peer in rows.items():
            if name in (OURS, OURS_LOCKSTEP) or peer.over_cap:
                continue
            num_compared += 1
            if peer.num_microbatches < ours.num_microbatches:
                misses.append(
                    f"{instance}: {name} has M {peer.num_microbatches}, ours "
                    f"{ours.num_microbatches}"
                )
            if peer.num_microbatches != ours.num_microbatches:
                continue
            if peer.balance < ours.balance - TOLERANCE:
                misses.append(f"{instance}: {name} {peer.balance=:.4f} {ours.balance=:.4f}")
            if peer.lockstep < locked.lockstep - TOLERANCE:
                misses.append(f"{instance}: {name} {peer.lockstep=:.4f} {locked.lockstep=:.4f}")
            num_traded += peer.lockstep < ours.lockstep - TOLERANCE
    print(f"\n{len(by_instance)} instances, {num_compared} comparisons with packers in the cap")
    print(f"M above the bound in {num_above} instances")
    print(f"balanced plans with more lock-step than a packer's, at equal M: {num_traded}")
    for miss in misses:
        print("missed:", miss)
    print("bar met" if not misses else f"bar missed {len(misses)} times")
    return not misses


def main() -> int:
    """Run the suite, or the part of it that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder with verl, areal, openrlhf")
    parser.add_argument("--fewest-peers", type=int, default=0, help="fail with fewer of them")
    parser.add_argument("--distributions", default="".join(DISTRIBUTIONS))
    parser.add_argument("--num-samples", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--dp", type=int, nargs="+", default=[4, 8, 32, 128])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    peers, problems = load_peers(args.peers) if args.peers else ({}, [])
    for problem in problems:
        print("not run:", problem)
    if len(peers) < args.fewest_peers:
        print(f"only {len(peers)} peers run, {args.fewest_peers} are wanted", file=sys.stderr)
        return 1
    results: list[Result] = []
    for distribution in args.distributions:
        for num_samples in args.num_samples:
            for dp in args.dp:
                for seed in range(args.draws if num_samples <= 4096 else 1):
                    instance = (distribution, num_samples, dp, seed)
                    results += _run_instance(instance, peers)
    print_table(results)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps([asdict(row) for row in results], indent=1))
    return 0 if judge(results) else 1


def _run_instance(instance: tuple[str, int, int, int], peers: dict[str, Packer]) -> list[Result]:
    _, num_samples, dp, _ = instance
    results = [run_ours(instance, 1, OURS), run_ours(instance, dp, OURS_LOCKSTEP)]
    if num_samples > MOST_SAMPLES_OF_PEERS:
        return results
    for name, packer in {**BASELINES, **peers}.items():
        try:
            results.append(run_packer(name, packer, instance))
        except Exception as error:  # another project's packer may refuse an instance
            print(f"{name} refuses {instance}: {error!r}"[:160], file=sys.stderr)
    return results


if __name__ == "__main__":
    sys.exit(main())

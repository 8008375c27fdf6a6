"""How long training waits for a step when the next rollout batch is there already.

    python -m benchmarks.prefetch_wait --step-seconds 1

Several ranks, as processes, run the step feed over a directory whose batches are all there; a step
makes its micro-batches and sleeps for the rest of --step-seconds, as if it trained. Shown are, over
all steps but the first (whose batch nobody could prepare), the wait as `wait_time` of step reports
has it, and the processor time that the training thread spent opening steps, which does not depend
on what else the machine does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megatron_dynbatch.handshake import publish_layout, write_planned
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps import Exchange, StepFeed

OPTIONS = PlanOptions(max_tokens_per_gpu=8192)


def write_batches(path: Path, layout: ParallelLayout, count: int, size: int) -> None:
    """Agentic batches: rollouts of four samples, log-normal lengths."""
    rng = np.random.default_rng(0)
    directory = RolloutDirectory(path)
    publish_layout(directory, layout, OPTIONS)
    for _ in range(count):
        lengths = np.clip(rng.lognormal(np.log(400), 0.8, size), 16, 8000).astype(int)
        write_planned(
            directory,
            [
                Sample(
                    rng.integers(0, 150_000, length), length // 2, rollout_id=row // 4,
                    advantage=1.0, rollout_log_probs=rng.normal(size=length // 2),
                )
                for row, length in enumerate(lengths.tolist())
            ],
        )  # fmt: skip
    directory.finish()


def run_rank(rank: int, args: argparse.Namespace, path: Path, port: int, results: object) -> None:
    """The feed of one rank; puts (wait, processor) seconds of each step in `results`."""
    store = dist.TCPStore("127.0.0.1", port, args.ranks, is_master=rank == 0)
    feed = StepFeed(
        RolloutDirectory(path),
        ParallelLayout(dp=args.ranks),
        OPTIONS,
        dp_rank=rank,
        exchange=Exchange(store, rank, args.ranks, timeout=300.0),
    )
    seconds: list[tuple[float, float]] = []
    while True:
        start = time.thread_time()
        step = feed.open_step()
        if step is None:
            break
        seconds.append((step.wait_seconds, time.thread_time() - start))
        end = time.monotonic() + args.step_seconds
        for k in range(step.num_microbatches):
            step.micro_batch(k)
        time.sleep(max(0.0, end - time.monotonic()))
        feed.finish_step()
    results.put((rank, seconds))  # type: ignore[attr-defined]
    while rank == 0 and any(child.is_alive() for child in multiprocessing.active_children()):
        time.sleep(0.1)
    time.sleep(1.0)  # the store is in rank 0's process


def main() -> None:
    """Run the ranks and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=30, help="each is one step")
    parser.add_argument("--samples", type=int, default=256, help="in a batch")
    parser.add_argument("--step-seconds", type=float, default=1.0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts"
        write_batches(path, ParallelLayout(dp=args.ranks), args.batches, args.samples)
        port = dist.TCPStore("127.0.0.1", 0, is_master=True).port
        results = context.Queue()
        ranks = [
            context.Process(target=run_rank, args=(rank, args, path, port, results), daemon=True)
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        for rank, seconds in sorted(results.get() for _ in ranks):
            shares = 100 * np.array(seconds[1:]) / args.step_seconds
            (wait, processor), (worst, worst_processor) = np.median(shares, 0), shares.max(0)
            print(
                f"rank {rank}, {len(shares)} steps of {args.step_seconds} s: wait {wait:.2f} % of "
                f"a step in the median, {worst:.2f} % at worst; processor {processor:.2f} %, "
                f"{worst_processor:.2f} %"
            )
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()

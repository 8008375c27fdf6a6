"""A loop of one's own under torchrun, without Megatron: a weight for each token, in exact numbers.

    torchrun … tests/reliability/restarting_loop.py FOLDER [STEP]

Reads FOLDER/rollouts, saves weights and cursor every two steps, and appends a line per step. In
the first attempt the last rank dies by SIGKILL in the middle of step STEP.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_dynbatch.hooks.rendezvous import install_rendezvous
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory
from megatron_dynbatch.steps import Cursor, Exchange, StepFeed

WIDTH = 64
SAVE_INTERVAL = 2
RATE = 1 / 8


def come_late(folder: Path) -> None:
    """Rank 0 is the last to begin the second attempt: the others meet what the first one left."""
    mark = folder / f"came-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    if int(os.environ["RANK"]) > 0:
        mark.touch()
    while not mark.exists():
        time.sleep(0.01)


def main(folder: Path, deadly_step: int | None) -> None:
    """Train to the end of the rollouts, or to the kill."""
    come_late(folder)
    install_rendezvous()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    feed = StepFeed(
        RolloutDirectory(folder / "rollouts"),
        ParallelLayout(dp=size),
        PlanOptions(max_tokens_per_gpu=WIDTH, rollouts_per_step=2),
        dp_rank=rank,
        exchange=Exchange.of_job(timeout=60.0, name="loop"),
    )
    weights, number = torch.ones(WIDTH, dtype=torch.float64), 0
    saved = folder / "saved"
    if saved.exists():
        state = torch.load(saved)
        weights, number = state["weights"], state["number"]
        feed.restore(Cursor.from_dict(state["cursor"]))
    while (step := feed.open_step()) is not None:
        gradient = torch.zeros_like(weights)
        for k in range(step.num_microbatches):
            batch = step.micro_batch(k)
            gradient.index_add_(0, batch.tokens[0] % WIDTH, batch.token_weights)
        number += 1
        if number == deadly_step and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(gradient)
        weights -= RATE * gradient / step.step_plan.loss_denominator * weights
        feed.finish_step()
        if rank == 0:
            line = {"step": number, "G": step.step_global_batch_size, "weights": weights.tolist()}
            with open(folder / "steps.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
            if number % SAVE_INTERVAL == 0:
                cursor = feed.cursor.to_dict()
                torch.save({"weights": weights, "number": number, "cursor": cursor}, f"{saved}-new")
                os.replace(f"{saved}-new", saved)
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)

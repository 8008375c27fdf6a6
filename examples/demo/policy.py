"""Pretrain script of the demo: GRPO with rollouts made at the step boundary.

Run by the launcher under torchrun, see `examples.demo.__main__`. Megatron's own loop trains;
`make_rollouts` is called on every rank whenever the next batch of rollouts is not there yet, plays
this rank's share of it with the weights as they are now, and rank 0 writes the batch.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.training import get_args
from torch import Tensor

import megatron_dynbatch
from examples.demo.agent import (
    Episode,
    group_advantages,
    groups_of_batch,
    play,
    to_samples,
)
from examples.demo.generator import Generator
from examples.demo.task import VOCAB_SIZE, Spelling
from examples.demo.weights import full_weights
from examples.tiny_gpt import train_gpt
from megatron_dynbatch import MicroBatch, RolloutDirectory
from megatron_dynbatch.losses import policy
from megatron_dynbatch.plan import StepPlan
from megatron_dynbatch.steps import Cursor

CLIP_HIGH = 0.28


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The demo's own options."""
    group = parser.add_argument_group("demo")
    group.add_argument("--demo-seed", type=int, required=True)
    group.add_argument(
        "--demo-groups", type=int, required=True, help="prompt groups per batch, on average"
    )
    group.add_argument("--demo-log", type=Path, required=True, help="JSONL, a line per batch")
    group.add_argument("--demo-progress", type=Path, required=True, help="JSONL of what runs now")
    group.add_argument("--demo-shuffle-advantages", action="store_true")
    return parser


def make_rollouts(cursor: Cursor, model: Sequence[Any]) -> None:
    """Play the batch that training needs next, a share of the prompt groups on every rank."""
    args = get_args()
    start = time.monotonic()
    rank, size = dist.get_rank(), dist.get_world_size()
    report_progress(args, rank, {"playing": cursor.batch_id})
    # Nothing is drawn from a running stream: a resumed run plays the same episodes again.
    batch_seed = args.demo_seed * 1_000_003 + cursor.batch_id
    seed = batch_seed * size + rank
    policy_now = Generator(
        full_weights(model), args.num_attention_heads, torch.Generator().manual_seed(seed)
    )
    words = Spelling(args.demo_seed, size=100_000)
    groups = groups_of_batch(cursor.batch_id, args.demo_groups, random.Random(batch_seed))
    own = play(words, groups[rank::size], policy_now, random.Random(seed))
    shares: list[list[Episode]] = [[] for _ in range(size)]
    dist.all_gather_object(shares, own)
    if rank == 0:
        episodes = [episode for share in shares for episode in share]
        write_batch(args, cursor.batch_id, episodes, time.monotonic() - start)


def write_batch(
    args: argparse.Namespace, batch_id: int, episodes: Sequence[Episode], seconds: float
) -> None:
    """Write the samples that teach something, and a line about all episodes."""
    advantages = group_advantages(episodes)
    if args.demo_shuffle_advantages:
        advantages = _shuffled(advantages, random.Random(batch_id))
    samples = to_samples(episodes, advantages)
    line = {
        "batch_id": batch_id,
        "reward": float(np.mean([e.reward for e in episodes])),
        "solved_at_once": float(np.mean([e.reward == 1.0 for e in episodes])),
        "num_episodes": len(episodes),
        "num_rollouts": len({s.rollout_id for s in samples}),
        "num_samples": len(samples),
        "turns": float(np.mean([e.turns for e in episodes])),
        "seconds": seconds,
    }
    with args.demo_log.open("a") as log:
        print(json.dumps(line), file=log, flush=True)
    RolloutDirectory(args.rollout_path, vocab_size=VOCAB_SIZE).write(samples)


def _shuffled(advantages: Sequence[Sequence[float]], draw: random.Random) -> list[list[float]]:
    """The same numbers, each given to another call."""
    numbers = [number for own in advantages for number in own]
    draw.shuffle(numbers)
    remaining = iter(numbers)
    return [[next(remaining) for _ in own] for own in advantages]


def report_progress(args: argparse.Namespace, rank: int, what: dict[str, int]) -> None:
    """Append what rank 0 does now to the file that the progress bar reads."""
    if rank == 0:
        with args.demo_progress.open("a") as file:
            print(json.dumps(what), file=file, flush=True)


class MicroBatchProgress:
    """Says which micro-batch of its step runs now."""

    def __init__(self) -> None:
        self._step: StepPlan | None = None
        self._number = 0

    def report(self, batch: MicroBatch) -> None:
        """Call it once at the start of each micro-batch."""
        self._number = self._number + 1 if batch.step is self._step else 0
        self._step = batch.step
        what = {"micro_batch": self._number, "num_microbatches": batch.step.num_microbatches}
        report_progress(get_args(), dist.get_rank(), what)


micro_batch_progress = MicroBatchProgress()


def forward_step(
    data_iterator: Any, model: Any
) -> tuple[Tensor, Callable[..., tuple[Tensor, dict[str, Tensor]]]]:
    """Run the model on one micro-batch; it returns token losses, minus the log-probs."""
    batch = megatron_dynbatch.get_batch(data_iterator)
    micro_batch_progress.report(batch)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params(),
    )
    return output, loss_function


def loss_function(output: Tensor, *, microbatch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy loss; the plugin scales the sum that it returns."""
    return policy(output, microbatch, clip_high=CLIP_HIGH)


def main() -> None:
    """Register the policy seam, train."""
    megatron_dynbatch.install()
    megatron_dynbatch.on_batch_needed(make_rollouts)
    train_gpt(forward_step, add_arguments)


if __name__ == "__main__":
    main()

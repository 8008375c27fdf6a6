"""Generation in a process of its own: writes batches ahead of training, as far as it may.

Batch b is generated with the newest weights, and not before some are there that were trained on
b − limit batches. With limit 0 generation and training take turns; with limit 1 the next batch is
generated while one trains, and so on.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from examples.demo.agent import group_advantages, groups_of_batch, play, to_samples
from examples.demo.generator import Generator
from examples.demo.task import VOCAB_SIZE, Spelling
from examples.demo.training import end_with_parent
from megatron_dynbatch.handshake import write_planned
from megatron_dynbatch.rollouts import open_transport
from megatron_dynbatch.rollouts.flow import wait_for_weights


@dataclass(frozen=True)
class Generation:
    """What to generate.

    Attributes:
        rollouts: Where batches go; `--rollout-path` of the training.
        log: JSONL, a line per batch.
        seed: Of words and sampling.
        num_batches: Batches before the run is closed.
        groups: Prompt groups per batch on average.
        limit: Largest age of a rollout when it is trained, in batches.
        least_seconds: A batch takes at least so long.
        num_heads: Attention heads of the policy.
    """

    rollouts: str
    log: Path
    seed: int
    num_batches: int
    groups: int
    limit: int
    least_seconds: float
    num_heads: int

    def start(self) -> BaseProcess:
        """Generate in a new process, which ends with this one."""
        process = multiprocessing.get_context("spawn").Process(target=self.run, daemon=True)
        process.start()
        return process

    def run(self) -> None:
        """Generate all batches and close the run."""
        end_with_parent()
        torch.set_num_threads(1)
        transport = open_transport(self.rollouts, vocab_size=VOCAB_SIZE)
        words = Spelling(self.seed, size=100_000)
        for batch_id in range(self.num_batches):
            version, path = wait_for_weights(transport, batch_id - self.limit)
            start = time.time()
            seed = self.seed * 1_000_003 + batch_id
            draw = random.Random(seed)
            policy = Generator(
                torch.load(path), self.num_heads, torch.Generator().manual_seed(seed)
            )
            groups = groups_of_batch(batch_id, self.groups, draw)
            episodes = play(words, groups, policy, draw)
            samples = to_samples(episodes, group_advantages(episodes))
            work = time.time() - start
            time.sleep(max(0.0, self.least_seconds - work))
            write_planned(transport, [replace(s, policy_version=version) for s in samples])
            line = {
                "batch_id": batch_id,
                "policy_version": version,
                "reward": float(np.mean([e.reward for e in episodes])),
                "start": start,
                "work": work,
                "end": time.time(),
            }
            with self.log.open("a") as file:
                print(json.dumps(line), file=file, flush=True)
        transport.finish()

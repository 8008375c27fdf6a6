"""The training side of `examples.grpo_async_ray`: Megatron's pretrain, and where weights go.

Whenever a batch opens (and before the first one) every rank gathers the weights, rank 0 writes them
to --weights-dir and tells the generators which version they are. With --least-step-seconds a step
lasts as long as that of a larger model would.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args
from torch import Tensor

import megatron_dynbatch
from examples import grpo_sync
from examples.demo.weights import full_weights
from examples.tiny_gpt import train_gpt
from megatron_dynbatch import MicroBatch, Sample
from megatron_dynbatch.plan import StepPlan
from megatron_dynbatch.rollouts import open_transport
from megatron_dynbatch.rollouts.flow import publish_weights
from megatron_dynbatch.steps import Cursor, LoadedBatch

KEPT_VERSIONS = 3

_published = -1


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Options of the example."""
    parser.add_argument("--weights-dir", type=Path, required=True)
    parser.add_argument("--boundary-log", type=Path, help="JSONL of when each step began and ended")
    parser.add_argument(
        "--least-step-seconds", type=float, default=0.0, help="a step takes at least so long"
    )
    return parser


def log_boundary(event: str, batch_id: int) -> None:
    """Note when a batch began or ended, on rank 0."""
    path = get_args().boundary_log
    if path is not None and dist.get_rank() == 0:
        with path.open("a") as file:
            line = {"event": event, "batch_id": batch_id, "time": time.time()}
            print(json.dumps(line), file=file, flush=True)


class LongStep:
    """Lets every step last for some time, by sleeping before its last micro-batch."""

    def __init__(self) -> None:
        self._step: StepPlan | None = None
        self._start = 0.0
        self._number = 0

    def before_micro_batch(self, batch: MicroBatch) -> None:
        """Call it once at the start of each micro-batch."""
        if batch.step is not self._step:
            self._step, self._start, self._number = batch.step, time.monotonic(), 0
            log_boundary("begin", _published)
        self._number += 1
        if self._number == batch.step.num_microbatches:
            left = self._start + get_args().least_step_seconds - time.monotonic()
            time.sleep(max(0.0, left))


long_step = LongStep()


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """That of the synchronous example, in a step that takes its time."""
    long_step.before_micro_batch(megatron_dynbatch.current())
    return grpo_sync.forward_step(data_iterator, model)


def publish(version: int, model: Sequence[Any]) -> None:
    """Hand the weights, trained on `version` batches, to the generators; on every rank."""
    global _published
    if version == _published:
        return
    if _published >= 0:
        log_boundary("end", _published)
    _published = version
    weights = full_weights(model)
    if dist.get_rank() == 0:
        args = get_args()
        path = args.weights_dir.resolve() / f"weights-{version:08d}.pt"
        args.weights_dir.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(weights, temporary)
        os.replace(temporary, path)
        publish_weights(open_transport(args.rollout_path), version, str(path))
        for old in sorted(args.weights_dir.glob("weights-*.pt"))[:-KEPT_VERSIONS]:
            old.unlink()


def publish_when_needed(cursor: Cursor, model: Sequence[Any]) -> None:
    """The generators wait for new weights while training waits for them."""
    publish(cursor.batch_id, model)


def publish_when_opened(batch: LoadedBatch, model: Sequence[Any]) -> Mapping[int, Sample]:
    """All batches before this one are trained."""
    publish(batch.batch_id, model)
    return batch.samples


def main() -> None:
    """Register both seams, train."""
    megatron_dynbatch.install()
    megatron_dynbatch.on_batch_needed(publish_when_needed)
    megatron_dynbatch.on_batch_opened(publish_when_opened)
    train_gpt(forward_step, add_arguments)
    log_boundary("end", _published)


if __name__ == "__main__":
    main()

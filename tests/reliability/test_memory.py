"""Nothing is kept longer than it is needed; `make memory` trains 500 steps of varying shapes."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps import StepFeed
from tests.harness import launch, watching
from tests.parity.job import OWN_SCRIPT, Cell
from tests.parity.reference import Recipe
from tests.pool import run_ranks

CAPACITY = 64
NUM_STEPS = 500
PERIOD = 50
FIRST_STEP = 200  # until then caches fill and the allocator meets its largest shapes
MOST_KB_PER_STEP = 20.0

pytestmark = pytest.mark.slow


def write_varying(path: Path, num_batches: int) -> None:
    """Batches of 1 to 12 rollouts of 2 to 60 tokens, the same ones every PERIOD batches."""
    directory = RolloutDirectory(path)
    for batch in range(num_batches):
        draw = random.Random(batch % PERIOD)
        lengths = [draw.randint(2, 60) for _ in range(draw.randint(1, 12))]
        directory.write(
            [Sample([draw.randrange(120) for _ in range(n)], n - 1, rollout_id=i)
             for i, n in enumerate(lengths)]
        )  # fmt: skip
    directory.finish()


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_host_copies_are_freed_after_their_batch(tmp_path: Path) -> None:
    num_batches = 40
    write_varying(tmp_path, num_batches)
    feed = StepFeed(
        RolloutDirectory(tmp_path),
        ParallelLayout(),
        PlanOptions(max_tokens_per_gpu=CAPACITY, rollouts_per_step=4, order="heaviest_first"),
    )
    samples: list[tuple[int, weakref.ref[Any]]] = []
    micro_batches: list[tuple[int, weakref.ref[Any]]] = []
    counts = []
    while (step := feed.open_step()) is not None:
        for k in range(step.num_microbatches):
            micro_batches.append((step.batch_id, weakref.ref(step.micro_batch(k).tokens)))
        if step.step_index == 0:
            samples += [(step.batch_id, weakref.ref(s.tokens)) for s in step.samples.values()]
        batch_id = step.batch_id
        del step
        feed.finish_step()
        if batch_id % 10 == 9 and feed.cursor.step_index == 0:
            prefetch = feed._next._prefetch
            assert prefetch is not None
            prefetch._done.wait(10)
            counts.append(live_tensors())
            # The batch after this one is prefetched; nothing of the ones before is there.
            assert [b for b, ref in samples + micro_batches if ref() is not None] == []
    feed.close()
    # What is prefetched varies by the next batch's micro-batches, not by the steps done.
    assert len(counts) == num_batches // 10
    assert max(counts) - min(counts) < 9 * 12


def heaviest_first(tokens: list[list[int]]) -> bool:
    return all(step == sorted(step, reverse=True) for step in tokens)


def test_the_heaviest_micro_batch_can_come_first(tmp_path: Path) -> None:
    """So that the allocator meets its largest shapes in the first pass of a step."""
    write_varying(tmp_path, 10)
    options = PlanOptions(max_tokens_per_gpu=CAPACITY, order="heaviest_first")
    feed = StepFeed(RolloutDirectory(tmp_path), ParallelLayout(pp=2), options)
    tokens = []
    while (step := feed.open_step()) is not None:
        counts = range(step.num_microbatches)
        tokens.append([step.micro_batch(k).num_tokens for k in counts])
        feed.finish_step()
    feed.close()
    assert heaviest_first(tokens) and any(len(set(step)) > 1 for step in tokens)


def settle() -> None:
    """Wait until the next batch is prefetched and packed."""
    from megatron_dynbatch.hooks.session import session

    run = session()
    assert run is not None and run.feed._next._prefetch is not None
    assert run.feed._next._prefetch._done.wait(30)
    run.feed._packer.submit(int).result()


def train_and_watch(argv: list[str]) -> list[tuple[int, float, int | None]]:
    """A training in this process: step, resident kB after it, live tensors after each 50th."""
    from megatron_dynbatch import hooks

    hooks.install()
    rows: list[tuple[int, float, int | None]] = []

    def logged(given: Mapping[str, Any]) -> None:
        iteration = given["iteration"]
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tensors = None
        if iteration % PERIOD == 0 and iteration < NUM_STEPS:
            settle()
            tensors = live_tensors()
        rows.append((iteration, pages * os.sysconf("SC_PAGE_SIZE") / 1024, tensors))

    with watching(logged=logged):
        launch(OWN_SCRIPT, argv)
    return rows


@pytest.mark.skipif(os.environ.get("MEMORY") != "full", reason="run by make memory")
@pytest.mark.timeout(1800)
def test_no_growth_over_500_steps(tmp_path: Path) -> None:
    assert os.environ.get("MALLOC_ARENA_MAX") == "1", "run by make memory"
    write_varying(tmp_path, NUM_STEPS)
    flags = {
        "dynamic-global-batch": True,
        "rollout-path": tmp_path,
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": CAPACITY,
    }
    argv = Cell(1, flags, Recipe(decay=10_000, clip_grad=0.0)).argv()
    (rows,) = run_ranks(1, train_and_watch, argv, timeout=1700)
    assert [iteration for iteration, _, _ in rows] == list(range(1, NUM_STEPS + 1))
    late = rows[FIRST_STEP:]
    steps, memory = np.array([row[0] for row in late]), np.array([row[1] for row in late])
    slope = float(np.polyfit(steps, memory, 1)[0])
    tensors = [row[2] for row in late if row[2] is not None]
    print(f"RSS slope {slope:.2f} kB per step, live tensors {tensors}")
    assert slope <= MOST_KB_PER_STEP
    # The same batches are open and prefetched at each count.
    assert len(tensors) == 5 and len(set(tensors)) == 1, tensors

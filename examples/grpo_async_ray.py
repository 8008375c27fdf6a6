r"""Asynchronous GRPO: generation in Ray workers runs ahead of training, within a staleness limit.

    python -m examples.grpo_async_ray --out runs/async

starts a local Ray (or joins --address HOST:PORT), workers that generate rollouts, and Megatron's
pretrain under torchrun (`examples.grpo_async_policy`). Batches go through the Ray transport;
weights come back as files.

An inference engine takes the place of the plain sampler with --engine package.module:function. The
function is called in the worker with (weights_path, version) whenever there are new weights, and
returns what answers prompts: token ids of several prompts → one `examples.demo.agent.Response`
(tokens and their log-probs) each. For SGLang or vLLM: start the engine at the first call, let it
load the weights at later ones, and wrap its `generate` with log-probs switched on.

Real size, an 8B model: the trainer on 8 GPUs that belong to the Ray cluster, generators elsewhere
in it; what `main` below starts on one machine is started by hand:

    torchrun --nproc-per-node 8 -m megatron_dynbatch.run --module examples.grpo_async_policy \
        --dynamic-global-batch --rollout-path ray://10.0.0.1:6379/run-7 \
        --rollouts-per-step batch --max-staleness 1 --weights-dir /shared/weights \
        --max-tokens-per-gpu 16384 --micro-batch-width variable --loss-reduction token \
        --lr 1e-6 --lr-decay-style constant --train-samples 100000 \
        --tensor-model-parallel-size 2 --sequence-parallel \
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
        --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu \
        --disable-bias-linear --untie-embeddings-and-output-weights \
        --position-embedding-type rope --max-position-embeddings 16384 \
        --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/model --eval-iters 0 \
        --load /shared/checkpoint --finetune --save /shared/run --save-interval 100
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from examples.demo.agent import Policy, group_advantages, play, to_samples
from examples.demo.generator import Generator
from examples.demo.runs import MODEL, NUM_HEADS
from examples.demo.task import VOCAB_SIZE, Spelling
from examples.demo.training import train
from megatron_dynbatch import Sample
from megatron_dynbatch.handshake import write_planned
from megatron_dynbatch.rollouts import RolloutCollector, RolloutTransport, open_transport
from megatron_dynbatch.rollouts.flow import published_weights, wait_for_weights
from megatron_dynbatch.rollouts.ray_local import start_local_ray
from megatron_dynbatch.wording import counted

Engine = Callable[[str, int], Policy]


def plain_sampler(weights_path: str, version: int) -> Policy:
    """The default engine: the demo's sampler in plain PyTorch."""
    seed = torch.Generator().manual_seed(version)
    return Generator(torch.load(weights_path), NUM_HEADS, seed)


class Worker:
    """Plays prompt groups with the newest weights that it was told of.

    Args:
        engine: `package.module:function`, see above.
        seed: Of the words.
    """

    def __init__(self, engine: str, seed: int) -> None:
        torch.set_num_threads(1)
        module, _, name = engine.partition(":")
        self._engine: Engine = getattr(importlib.import_module(module), name)
        self._words = Spelling(seed, size=100_000)
        self._version = -1
        self._policy: Policy | None = None

    def play(self, group: int, version: int, weights_path: str) -> list[Sample]:
        """The samples of one prompt group."""
        if version != self._version:
            self._policy, self._version = self._engine(weights_path, version), version
        assert self._policy is not None
        episodes = play(self._words, [group], self._policy, random.Random(group))
        return to_samples(episodes, group_advantages(episodes))


def generate(
    transport: RolloutTransport,
    workers: Sequence[Any],
    *,
    num_batches: int,
    groups_per_batch: int,
    max_staleness: int,
    ledger: Path,
) -> None:
    """Keep the workers busy until the batches are written.

    A group is started only with weights that keep the batch it is likely to be in within the
    limit; so generation waits when it is too far ahead of training.

    Args:
        transport: Where batches go.
        workers: Handles of Ray actors `Worker`.
        num_batches: Batches to write before the run is closed.
        groups_per_batch: Prompt groups in a batch.
        max_staleness: Largest age of a rollout, in batches.
        ledger: JSONL, a line per batch: id, time, groups dropped so far.
    """
    collector = RolloutCollector(
        partial(write_planned, transport), groups_per_batch, max_staleness=max_staleness
    )
    idle, running, group = list(workers), {}, 0
    while collector.next_batch < num_batches:
        oldest = collector.batch_of(len(running)) - max_staleness
        weights = published_weights(transport)
        if not running:
            weights = wait_for_weights(transport, oldest)
        while idle and weights is not None and weights[0] >= oldest:
            worker = idle.pop()
            running[worker.play.remote(group, *weights)] = (worker, weights[0])
            group += 1
            oldest = collector.batch_of(len(running)) - max_staleness
        for ref in ray.wait(list(running), timeout=0.2)[0]:
            worker, version = running.pop(ref)
            idle.append(worker)
            batch_id = collector.add(ray.get(ref), version)
            if batch_id is not None:
                line = {"batch_id": batch_id, "time": time.time(), "dropped": collector.num_dropped}
                with ledger.open("a") as file:
                    print(json.dumps(line), file=file, flush=True)


def generate_in_thread(
    transport: RolloutTransport, workers: Sequence[Any], **options: Any
) -> Future[None]:
    """Start `generate`; the run is closed at its end, also at an error: training then ends too."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            generate(transport, workers, **options)
            result.set_result(None)
        except BaseException as error:
            result.set_exception(error)
        finally:
            transport.finish()

    threading.Thread(target=run, daemon=True).start()
    return result


def launch(args: argparse.Namespace, path: str) -> list[str]:
    """The trainer's command line."""
    return [
        "--module", "examples.grpo_async_policy", *MODEL, "--seed", "1",
        "--lr", "1e-3", "--lr-decay-style", "constant", "--train-samples", "1000000",
        "--dynamic-global-batch", "--rollout-path", path, "--rollouts-per-step", "batch",
        "--max-tokens-per-gpu", "256", "--micro-batch-width", "variable",
        "--max-staleness", str(args.max_staleness), "--step-report", str(args.out / "steps.jsonl"),
        "--weights-dir", str(args.out / "weights"),
    ]  # fmt: skip


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR")
    add("--address", help="HOST:PORT of a Ray cluster; default: start one here")
    add("--engine", default="examples.grpo_async_ray:plain_sampler", metavar="pkg.mod:fn")
    add("--workers", type=int, default=2)
    add("--processes", type=int, default=1, help="ranks that train")
    add("--batches", type=int, default=20)
    add("--groups", type=int, default=8, help="prompt groups per batch")
    add("--max-staleness", type=int, default=1, metavar="BATCHES")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Generate in Ray workers and train, at the same time."""
    args = parse_arguments(argv)
    args.out = args.out.resolve()  # Ray's workers have a working directory of their own
    args.out.mkdir(parents=True, exist_ok=True)
    if args.address:
        ray.init(address=args.address, log_to_driver=False)
    else:
        start_local_ray()
    run_name = f"grpo-{time.time_ns()}"
    path = f"ray://{ray.get_runtime_context().gcs_address}/{run_name}"
    transport = open_transport(path, vocab_size=VOCAB_SIZE)
    workers = [
        ray.remote(Worker).options(num_cpus=0).remote(args.engine, 1) for _ in range(args.workers)
    ]
    generation = generate_in_thread(
        transport,
        workers,
        num_batches=args.batches,
        groups_per_batch=args.groups,
        max_staleness=args.max_staleness,
        ledger=args.out / "generation.jsonl",
    )
    try:
        train_while_generating(args, path)
    finally:  # why there are no more rollouts, rather than that there are none
        if generation.done():
            generation.result()
    generation.result()
    ray.shutdown()


def train_while_generating(args: argparse.Namespace, path: str) -> None:
    """Train from a Ray address until the run is closed; a line per step."""
    train(
        launch(args, path),
        args.out / "steps.jsonl",
        args.out / "training.log",
        lambda report: print(
            f"step {report.iteration}: batch {report.batch_id}, "
            f"{counted(report.step_global_batch_size, 'rollout')}, "
            f"waited {report.wait_time or 0:.1f} s",
            flush=True,
        ),
        num_processes=args.processes,
    )


if __name__ == "__main__":
    main()

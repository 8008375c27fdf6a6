"""Run a pretrain script on the CPU under one layout and split, and keep what came out of it.

Each cell is run by a world of forked processes with the real Megatron. Weights are those of the
first cell, and no optimizer step changes them: every step's loss, gradient and metrics are a
function of its rollouts alone, which is what `verify` compares.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Place = tuple[int, int]
"""Tensor- and pipeline-parallel rank."""

Split = list[list[list[int]]]
"""[dp] lists of micro-batches: the sample rows of each; a dummy has none."""


@dataclass(frozen=True)
class Cell:
    """One way to run the same rollouts.

    Attributes:
        name: For the table.
        kinds: What it is meant to vary, of `verify_result.KINDS`; the reference varies nothing.
        dp: Data-parallel size.
        cp: Context-parallel size.
        max_tokens_per_gpu: Cap that decides the split into micro-batches.
    """

    name: str
    kinds: frozenset[str]
    dp: int
    cp: int
    max_tokens_per_gpu: int


@dataclass
class Outcome:
    """What a cell's run left behind.

    Attributes:
        metrics: Of each step: name → reported value.
        gradients: Of each step: place in the model → name → gradient before clipping.
        splits: Of each step: [dp] lists of micro-batches, each the rows of its samples.
        trained: Of each step: (data-, context-parallel rank) → trained tokens it has.
        error: Traceback of the rank that failed, if one did.
    """

    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[Place, dict[str, Tensor]]] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    trained: list[dict[tuple[int, int], int]] = field(default_factory=list)
    error: str | None = None


@dataclass(frozen=True)
class Job:
    """One run of a script.

    Attributes:
        script: The user's pretrain script.
        argv: Its whole command line.
        world: Number of processes.
        folder: Empty folder for this run.
        weights: Folder of the initial weights: written if empty, else read.
    """

    script: Path
    argv: tuple[str, ...]
    world: int
    folder: Path
    weights: Path


class RankPool:
    """Worlds of processes that run jobs.

    Args:
        timeout: Seconds until a run counts as hanging.
        shared: Whether a world runs several jobs, one after the other. That is faster, and for
            scripts whose modules keep nothing from one training to the next.
    """

    def __init__(self, timeout: float, shared: bool = False) -> None:
        self.timeout = timeout
        self.shared = shared
        self._worlds: dict[int, _World] = {}

    def run(self, job: Job) -> Outcome:
        """Run a job; a world in which a rank failed is not used again."""
        world = self._worlds.pop(job.world, None) or _World(job.world, self.timeout)
        outcome = world.run(job)
        if self.shared and outcome.error is None:
            self._worlds[job.world] = world
        else:
            world.end()
        return outcome

    def end(self) -> None:
        """End all processes."""
        while self._worlds:
            self._worlds.popitem()[1].end()


class _World:
    """Ranks that wait for jobs, and the folder in which they find each other."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self._store = tempfile.TemporaryDirectory(prefix="verify-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron_dynbatch.cli.verify_preload"])
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            theirs, ours = context.Pipe(duplex=False)
            arguments = (rank, size, f"{self._store.name}/store", timeout, theirs)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append(process)
            self._pipes.append(ours)

    def run(self, job: Job) -> Outcome:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead rank is told of below
                pipe.send(job)
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline and all(rank.is_alive() for rank in self._ranks):
            if any(job.folder.glob("error-*")):
                break
            if len(list(job.folder.glob("rank-*.pt"))) == self.size:
                break
            time.sleep(0.02)
        return _collect(job)

    def end(self) -> None:
        for rank, pipe in zip(self._ranks, self._pipes, strict=True):
            pipe.close()
            rank.kill()
            rank.join()
        self._store.cleanup()


def _collect(job: Job) -> Outcome:
    import torch

    folder = job.folder
    errors = sorted(folder.glob("error-*"))
    answers = sorted(folder.glob("rank-*.pt"))
    if errors:
        return Outcome(error=f"rank {errors[0].name[6:]}: {errors[0].read_text()}")
    if len(answers) < job.world:
        logs = [p.read_text(errors="replace")[-2000:] for p in sorted(folder.glob("log-*"))]
        return Outcome(error="\n".join(["a rank died or hangs; the end of all output:", *logs]))
    outcome = Outcome()
    for path in answers:
        answer = torch.load(path, weights_only=True)
        if answer["metrics"] and answer["metrics"][0]:
            outcome.metrics = answer["metrics"]  # the same on every rank of the last stage
        outcome.splits = answer["splits"]  # the same on every rank
        rank = tuple(answer["data_rank"])
        for step, tokens in enumerate(answer["trained"]):
            if step == len(outcome.trained):
                outcome.trained.append({})
            # Stages between the first and the last do not read the masks.
            outcome.trained[step][rank] = max(tokens, outcome.trained[step].get(rank, 0))
        if answer["gradients"] is not None:
            place = tuple(answer["place"])
            for step, gradients in enumerate(answer["gradients"]):
                if step == len(outcome.gradients):
                    outcome.gradients.append({})
                outcome.gradients[step][place] = gradients
    return outcome


def _rank_main(rank: int, size: int, store: str, timeout: float, jobs: Connection) -> None:
    """The life of a rank; leaves without waiting for threads of Megatron or gloo."""
    import torch

    # Megatron writes checkpoints from child processes, which daemons may not have.
    multiprocessing.current_process().daemon = False
    started = False
    while True:
        try:
            job: Job = jobs.recv()
        except EOFError:
            os._exit(0)
        folder = job.folder
        log = open(folder / f"log-{rank}", "w", buffering=1)  # noqa: SIM115
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        try:
            if not started:
                _join(rank, size, store, timeout)
                started = True
            torch.save(_train(job), folder / f"rank-{rank}.tmp")
            os.rename(folder / f"rank-{rank}.tmp", folder / f"rank-{rank}.pt")
        except BaseException as error:  # SystemExit too: Megatron ends processes that way
            text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            (folder / f"error-{rank}.tmp").write_text(text)
            os.rename(folder / f"error-{rank}.tmp", folder / f"error-{rank}")


def _join(rank: int, size: int, store: str, timeout: float) -> None:
    """Make this process a rank of the world, with the hooks installed."""
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    from megatron_dynbatch import cpu, hooks

    cpu.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    hooks.install()


def _train(job: Job) -> dict[str, Any]:
    from megatron_dynbatch.cpu import reset_megatron
    from megatron_dynbatch.run import Launch, run_target

    reset_megatron()
    answer: dict[str, Any] = {
        "metrics": [], "gradients": None, "place": None, "splits": [], "trained": [],
        "data_rank": [0, 0],
    }  # fmt: skip
    with _observed(answer, job.weights):
        try:
            run_target(Launch(str(job.script), False, job.argv, cpu=True))
        except SystemExit as end:
            if end.code:
                raise
    return answer


@contextlib.contextmanager
def _observed(answer: dict[str, Any], weights: Path) -> Iterator[None]:
    """Megatron's loop and log, wrapped while a script runs."""
    from megatron.training import training

    train_loop, log = training.train, training.training_log

    @functools.wraps(train_loop)
    def train(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(train_loop).bind(*args, **kwargs).arguments
        _share_weights(given["model"], given["optimizer"], weights)
        given["optimizer"].step = _record_gradients(answer, given["model"])
        return train_loop(*args, **kwargs)

    @functools.wraps(log)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        losses = inspect.signature(log).bind(*args, **kwargs).arguments["loss_dict"]
        answer["metrics"].append({name: float(value) for name, value in losses.items()})
        return log(*args, **kwargs)

    training.train, training.training_log = train, training_log
    try:
        yield
    finally:
        training.train, training.training_log = train_loop, log


def _place() -> Place:
    from megatron.core import mpu

    return mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()


def _named_parameters(model: Sequence[Any]) -> dict[str, Any]:
    from megatron.core.utils import unwrap_model

    chunks = enumerate(unwrap_model(list(model)))
    return {f"{i}.{name}": p for i, chunk in chunks for name, p in chunk.named_parameters()}


def _share_weights(model: Sequence[Any], optimizer: Any, folder: Path) -> None:
    """Save the weights of the first cell, give them to all others."""
    import torch
    from megatron.core import mpu

    path = folder / "-".join(str(n) for n in _place())
    own = _named_parameters(model)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])
        optimizer.reload_model_params()
    elif mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
        torch.save({name: p.detach().clone() for name, p in own.items()}, path)


def _record_gradients(answer: dict[str, Any], model: Sequence[Any]) -> Callable[[], Any]:
    """An optimizer step that keeps gradients, notes how the data were split, changes nothing."""
    from megatron.core import mpu

    from megatron_dynbatch.hooks.session import session

    keeps = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    if keeps:
        answer["gradients"], answer["place"] = [], list(_place())

    answer["data_rank"] = [mpu.get_data_parallel_rank(), mpu.get_context_parallel_rank()]

    def step() -> tuple[bool, float, None]:
        run = session()
        if run is not None and run.step is not None:
            opened = run.step
            parts = (opened.micro_batch(k) for k in range(opened.num_microbatches))
            answer["splits"].append([list(map(list, r)) for r in opened.step_plan.micro_batches])
            answer["trained"].append(sum(int(part.loss_mask.sum()) for part in parts))
        if keeps:
            answer["gradients"].append(
                {
                    name: _gradient(p).detach().double().clone()
                    for name, p in _named_parameters(model).items()
                    if p.requires_grad
                }
            )
        return True, 0.0, None

    return step


def _gradient(parameter: Any) -> Tensor:
    gradient = getattr(parameter, "main_grad", parameter.grad)
    return parameter.new_zeros(parameter.shape) if gradient is None else gradient

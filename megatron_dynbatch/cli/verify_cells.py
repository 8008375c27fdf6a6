"""Run a pretrain script on the CPU under one layout and split, and keep what came out of it.

Each cell is a world of forked processes that run the real Megatron. Weights are those of the first
cell, and no optimizer step changes them: every step's loss, gradient and metrics are a function of
its rollouts alone, which is what `verify` compares.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Place = tuple[int, int]
"""Tensor- and pipeline-parallel rank."""


@dataclass(frozen=True)
class Cell:
    """One way to run the same rollouts.

    Attributes:
        name: For the table.
        kind: What it varies: "reference", "packing", "dp", "cp", "masked" or "twice".
        dp: Data-parallel size.
        cp: Context-parallel size.
        max_tokens_per_gpu: Cap that decides the split into micro-batches.
    """

    name: str
    kind: str
    dp: int
    cp: int
    max_tokens_per_gpu: int


@dataclass
class Outcome:
    """What a cell's run left behind.

    Attributes:
        metrics: Of each step: name → reported value.
        gradients: Of each step: place in the model → name → gradient before clipping.
        error: Traceback of the rank that failed, if one did.
    """

    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[Place, dict[str, Tensor]]] = field(default_factory=list)
    error: str | None = None


def run_cell(
    script: Path, argv: Sequence[str], world: int, folder: Path, weights: Path, timeout: float
) -> Outcome:
    """Run the script on `world` ranks.

    Args:
        script: The user's pretrain script.
        argv: Its whole command line.
        world: Number of processes.
        folder: Empty folder for this cell.
        weights: Folder of the initial weights: written if empty, else read.
        timeout: Seconds until the run counts as hanging.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_dynbatch.cli.verify_preload"])
    ranks = [
        context.Process(
            target=_rank_main,
            args=(rank, world, str(script), list(argv), str(folder), str(weights), timeout),
            daemon=True,
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    try:
        _wait(ranks, folder, timeout)
        return _collect(folder, world)
    finally:
        for rank in ranks:
            if rank.is_alive():
                rank.kill()
            rank.join()


def _wait(ranks: Sequence[Any], folder: Path, timeout: float) -> None:
    """Until all ranks have answered, one has failed, or the time is over."""
    deadline = time.monotonic() + timeout
    while any(rank.is_alive() for rank in ranks):
        if any(folder.glob("error-*")) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _collect(folder: Path, world: int) -> Outcome:
    import torch

    errors = sorted(folder.glob("error-*"))
    answers = sorted(folder.glob("rank-*.pt"))
    if errors:
        return Outcome(error=f"rank {errors[0].name[6:]}: {errors[0].read_text()}")
    if len(answers) < world:
        logs = [p.read_text(errors="replace")[-2000:] for p in sorted(folder.glob("log-*"))]
        return Outcome(error="\n".join(["a rank died or hangs; the end of all output:", *logs]))
    outcome = Outcome()
    for path in answers:
        answer = torch.load(path, weights_only=True)
        if answer["metrics"] and answer["metrics"][0]:
            outcome.metrics = answer["metrics"]  # the same on every rank of the last stage
        if answer["gradients"] is not None:
            place = tuple(answer["place"])
            for step, gradients in enumerate(answer["gradients"]):
                if step == len(outcome.gradients):
                    outcome.gradients.append({})
                outcome.gradients[step][place] = gradients
    return outcome


def _rank_main(
    rank: int,
    world: int,
    script: str,
    argv: list[str],
    folder: str,
    weights: str,
    timeout: float,
) -> None:
    """The life of a rank; leaves without waiting for threads of Megatron or gloo."""
    log = open(f"{folder}/log-{rank}", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    import torch

    try:
        answer = _train(rank, world, script, argv, folder, weights, timeout)
        torch.save(answer, f"{folder}/rank-{rank}.tmp")
        os.rename(f"{folder}/rank-{rank}.tmp", f"{folder}/rank-{rank}.pt")
        torch.distributed.barrier()
    except BaseException as error:  # SystemExit too: Megatron ends processes that way
        text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
        Path(f"{folder}/error-{rank}.tmp").write_text(text)
        os.rename(f"{folder}/error-{rank}.tmp", f"{folder}/error-{rank}")
    log.flush()
    os._exit(0)


def _train(
    rank: int,
    world: int,
    script: str,
    argv: list[str],
    folder: str,
    weights: str,
    timeout: float,
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    from megatron_dynbatch import cpu, hooks
    from megatron_dynbatch.run import Launch, run_target

    cpu.enable()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )
    hooks.install()
    answer: dict[str, Any] = {"metrics": [], "gradients": None, "place": None}
    _observe(answer, Path(weights))
    try:
        run_target(Launch(script, False, tuple(argv), cpu=True))
    except SystemExit as end:
        if end.code:
            raise
    return answer


def _observe(answer: dict[str, Any], weights: Path) -> None:
    """Wrap Megatron's loop and log; the process ends with the run, so nothing is put back."""
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
    """An optimizer step that keeps gradients and changes nothing."""
    from megatron.core import mpu

    keeps = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    if keeps:
        answer["gradients"], answer["place"] = [], list(_place())

    def step() -> tuple[bool, float, None]:
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

"""Run a function on several ranks, each in a fresh process that starts in milliseconds.

A fork server imports torch and Megatron once (on the CPU, `megatron_dynbatch.cpu.enable()`); every
job forks its ranks from it. So each job meets Megatron as a new process does, nothing is left over
from the job before, and a rank that hangs or dies takes only its own job with it.

    from tests.pool import run_ranks

    def job(scale: float) -> float:              # any picklable function
        rank = torch.tensor(float(torch.distributed.get_rank()))
        torch.distributed.all_reduce(rank)
        return scale * rank.item()

    assert run_ranks(2, job, 3.0) == [3.0, 3.0]  # one result per rank

`tests.cpu.training` runs whole Megatron trainings on top of this.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
LOG_TAIL = 4000
# What gloo and the store say on a rank whose peer has gone.
PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class RankError(AssertionError):
    """A rank raised, died or did not finish in time; the message has its traceback and log."""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    process_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(*args, **kwargs)` on every rank of a new gloo world.

    Args:
        size: Number of ranks.
        function: Picklable, therefore defined at the top level of a module.
        *args: Its arguments, picklable.
        timeout: Seconds until the job is ended and reported as hanging.
        process_group: Whether torch.distributed is initialised before the call.
        **kwargs: Its keyword arguments, picklable.

    Returns:
        Each rank's result, in rank order.

    Raises:
        RankError: A rank raised, died or hung. All ranks have been ended.
    """
    payload = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [
            _Rank(rank, size, Path(folder), payload, timeout, process_group) for rank in range(size)
        ]
        try:
            return _gather(ranks, timeout)
        finally:
            for rank in ranks:
                rank.end()


class _Rank:
    """The parent's side of one rank: its process, its pipe, its log."""

    def __init__(
        self,
        rank: int,
        size: int,
        folder: Path,
        payload: bytes,
        timeout: float,
        process_group: bool,
    ) -> None:
        self.rank = rank
        self.log = folder / f"rank{rank}.log"
        self.connection, theirs = multiprocessing.Pipe(duplex=False)
        self.process = _context().Process(
            target=_rank_main,
            args=(rank, size, str(folder), theirs, sys.path, payload, timeout, process_group),
            daemon=True,
        )
        with _no_main_module():
            self.process.start()
        theirs.close()

    def end(self) -> None:
        """End the rank and whatever processes it has started."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()

    def log_tail(self) -> str:
        if not self.log.exists():
            return "(no output)"
        return self.log.read_text(errors="replace")[-LOG_TAIL:]


def _context() -> Any:
    """The fork server's context, with Megatron imported in the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.pool_preload"])
    # The server is started by the first process; it finds the package through the environment.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return context


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the parent's script (pytest) again in every rank."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _gather(ranks: list[_Rank], timeout: float) -> list[Any]:
    """Wait for every rank's answer; a failure that is a rank's own ends the job."""
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    lost: list[str] = []
    waiting = {rank.connection: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            _report_hang(list(waiting.values()), timeout, lost)
        own = []
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            succeeded, answer = _answer_of(rank, deadline)
            if succeeded:
                results[rank.rank] = answer
                continue
            # A rank whose peer has gone may tell so before the end of that peer is seen.
            of_peer = any(sign in answer for sign in PEER_LOST)
            text = f"rank {rank.rank}: {answer}\nits output:\n{rank.log_tail()}"
            (lost if of_peer else own).append(text)
        if own:
            raise RankError("\n\n".join([*own, *lost]))
    if lost:
        raise RankError("\n\n".join(lost))
    return [results[rank] for rank in sorted(results)]


def _answer_of(rank: _Rank, deadline: float) -> tuple[bool, Any]:
    """Whether the rank succeeded, and its result or what it ended in."""
    try:
        succeeded, answer = pickle.loads(rank.connection.recv_bytes())
    except EOFError:
        # Its pipe is closed before its exit code is known.
        rank.process.join(max(0.0, deadline - time.monotonic()))
        return False, f"died with exit code {rank.process.exitcode}"
    return succeeded, answer


def _report_hang(stuck: list[_Rank], timeout: float, lost: list[str]) -> NoReturn:
    for rank in stuck:
        if rank.process.is_alive() and rank.process.pid is not None:
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    texts = [f"rank {rank.rank} has not finished; its output:\n{rank.log_tail()}" for rank in stuck]
    raise RankError(f"no result within {timeout:g} s\n\n" + "\n\n".join([*texts, *lost]))


def _rank_main(
    rank: int,
    size: int,
    folder: str,
    connection: Connection,
    path: list[str],
    payload: bytes,
    timeout: float,
    process_group: bool,
) -> None:
    """The life of a rank: set up, call, answer, leave without waiting for anything."""
    os.setpgid(0, 0)
    log = open(f"{folder}/rank{rank}.log", "w", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log)
    # Megatron writes checkpoints from child processes, which daemons may not have.
    multiprocessing.current_process().daemon = False
    try:
        sys.path[:] = path
        function, args, kwargs = pickle.loads(payload)
        with _world(rank, size, folder, timeout, process_group):
            answer = (True, function(*args, **kwargs))
        buffer = io.BytesIO()
        _AnswerPickler(buffer).dump(answer)
        message = buffer.getvalue()
    except BaseException:  # SystemExit too: Megatron ends processes that way
        message = pickle.dumps((False, traceback.format_exc()))
    log.flush()
    connection.send_bytes(message)
    # Threads of process groups and of Megatron must not delay the end.
    os._exit(0)


class _AnswerPickler(pickle.Pickler):
    """Pickle tensors by value.

    Megatron replaces torch's loader of pickled tensors with its own, so that the parent would have
    to import Megatron to read a plain answer.
    """

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        buffer = io.BytesIO()
        torch.save(obj.detach().clone(), buffer)
        return _load_tensor, (buffer.getvalue(),)


def _load_tensor(saved: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(saved), weights_only=True)


@contextlib.contextmanager
def _world(
    rank: int, size: int, folder: str, timeout: float, process_group: bool
) -> Iterator[None]:
    """What torchrun would have set, and the default process group over a file."""
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    if process_group:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
    yield
    if process_group:
        # A rank that leaves early would close connections the others still read from.
        dist.barrier()

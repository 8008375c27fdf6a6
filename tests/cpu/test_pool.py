"""A rank that raises, dies or hangs is a failure that says so; the next job is not touched."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, run_ranks


def total(scale: float) -> float:
    value = torch.tensor(float(dist.get_rank()) + 1)
    dist.all_reduce(value)
    return scale * value.item()


def one_rank_fails(how: str) -> None:
    if dist.get_rank() == 1:
        print("about to fail")
        if how == "raise":
            raise ValueError("no such thing")
        if how == "exit":
            raise SystemExit(3)
        if how == "die":
            os._exit(9)
        time.sleep(60)
    dist.barrier()


def peer_fails_first(folder: str) -> None:
    """Rank 1 cuts its connections and dies only when rank 0 has failed of that and is gone."""
    note = Path(folder) / "pid"
    if dist.get_rank() == 0:
        temporary = note.with_suffix(".part")
        temporary.write_text(str(os.getpid()))
        temporary.rename(note)
        dist.barrier()
    while not note.exists():
        time.sleep(0.01)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as cut:
            cut.getpeername()  # a socket that listens has none, and must stay
            cut.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(int(note.read_text()), 0)
            time.sleep(0.01)
    os._exit(9)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order_from_one_world(size: int) -> None:
    assert run_ranks(size, total, 2.0) == [size * (size + 1.0)] * size


def test_the_rank_that_failed_is_named_though_another_one_fails_of_it_first(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankError, match="^rank 1: died with exit code 9") as error:
        run_ranks(2, peer_fails_first, str(tmp_path), timeout=60)
    assert "rank 0: Traceback" in str(error.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "no such thing"),
        ("exit", "SystemExit: 3"),
        ("die", "rank 1: died with exit code 9"),
        pytest.param("hang", "no result within 15 s", marks=pytest.mark.slow),
    ],
)
def test_failing_rank_ends_the_job_and_not_the_next(how: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as error:
        # A loaded machine takes seconds to start two ranks.
        run_ranks(2, one_rank_fails, how, timeout=15 if how == "hang" else 60)
    assert "rank 1" in str(error.value)
    if how == "hang":
        assert "one_rank_fails" in str(error.value)  # where it hangs
    assert run_ranks(2, total, 1.0) == [3.0, 3.0]

"""Names in a store that outlives the processes: every attempt of a job has its own.

Under `torchrun --max-restarts` the launcher keeps the store while all ranks are started again, and
in one process a training may begin anew over a store that is still there. So rank 0 makes a name
that never was before, and each rank says that it has come under this name, where only one process
of a rank ever can (a counter); rank 0 answers when all have. A name of a dead attempt is never
answered, so what is left in the store of one, or written by a late member of it, is not seen by the
next. No clock, no count of restarts and no collective has a part in it.
"""

from __future__ import annotations

import uuid

import torch.distributed as dist

from megatron_dynbatch.steps.waiting import (
    GRACE_SECONDS,
    RankFailure,
    alone_error,
    end_exchange,
    named,
    timeout_error,
    wait_until,
)

_LEADER = "leader"


def join_attempt(
    store: dist.Store, rank: int, world_size: int, *, timeout: float, name: str
) -> dist.Store:
    """The part of a store that belongs to the ranks that join now, and to nobody before or after.

    Every rank must call it. An earlier attempt in which this rank already was is told that it is
    over, so that members of it that still live end with an error instead of waiting.

    Args:
        store: What all ranks share; may hold whatever earlier attempts left.
        rank: Of this process, 0 ≤ rank < world_size.
        world_size: Number of processes that join.
        timeout: Seconds that rank 0 waits for the others.
        name: Of what is joined; several at once over one store have several names.

    Raises:
        RankFailure: Not all ranks came; or this one came alone, and the others did not start again.
    """
    lobby = dist.PrefixStore(f"megatron_dynbatch/attempts/{name}", store)
    if rank == 0:
        attempt = _lead(lobby, world_size, timeout, name)
    else:
        attempt = _follow(lobby, rank, timeout + GRACE_SECONDS, name)
    return _of_attempt(lobby, attempt)


def _lead(lobby: dist.Store, world_size: int, timeout: float, name: str) -> str:
    """Rank 0's part: begin an attempt, wait until all have come, and tell them."""
    is_again = lobby.check([_LEADER])
    if is_again:
        before = _of_attempt(lobby, lobby.get(_LEADER).decode())
        end_exchange(before, name, 0, alone_error(0, name))
    attempt = uuid.uuid4().hex
    own = _of_attempt(lobby, attempt)
    lobby.set(_LEADER, attempt)
    others = range(1, world_size)
    missing = list(others)

    def have_all_come() -> bool:
        while missing and own.check([_joined(missing[0])]):
            del missing[0]
        return not missing

    def in_vain() -> RankFailure:
        absent = [rank for rank in missing if not own.check([_joined(rank)])]
        if is_again and len(absent) == len(others):
            return alone_error(0, name)
        return timeout_error(0, timeout, f"{named(absent)} to start")

    wait_until(have_all_come, 0, lambda: f"{named(missing)} to start", timeout, in_vain)
    for rank in others:
        own.set(_answer(rank), "")
    return attempt


def _follow(lobby: dist.Store, rank: int, timeout: float, name: str) -> str:
    """Another rank's part: come under the name that rank 0 made, until it answers."""
    attempt: str | None = None
    was_there = False

    def is_answered() -> bool:
        nonlocal attempt, was_there
        if not lobby.check([_LEADER]):
            return False
        newest = lobby.get(_LEADER).decode()
        own = _of_attempt(lobby, newest)
        if newest != attempt:
            attempt = newest
            was_there = own.add(_joined(rank), 1) > 1
            if was_there:  # a dead attempt, or the others live and this rank came back alone
                end_exchange(own, name, rank, alone_error(rank, name))
        return not was_there and own.check([_answer(rank)])

    def in_vain() -> RankFailure:
        if was_there:
            return alone_error(rank, name)
        return timeout_error(rank, timeout, "all ranks to start, rank 0 first")

    wait_until(is_answered, rank, lambda: "all ranks to start, rank 0 first", timeout, in_vain)
    assert attempt is not None
    return attempt


def _of_attempt(lobby: dist.Store, attempt: str) -> dist.Store:
    return dist.PrefixStore(attempt, lobby)


def _joined(rank: int) -> str:
    return f"came/{rank}"


def _answer(rank: int) -> str:
    return f"all came/{rank}"

"""How ranks wait for each other: not too long, not in silence, and with the error that names it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.output import progress

# The others' patience beyond rank 0's, so that its error, which names the missing, comes first.
GRACE_SECONDS = 10.0
# Key under which the ranks of an exchange find an error of any of them.
FAILED = "failed"

_PROGRESS_SECONDS = 10.0
_POLL_SECONDS = (0.0005, 0.2)
_POLL_SHARE = 0.02


class RankFailure(DynbatchError, RuntimeError):
    """Another rank failed, disagreed, or did not arrive."""


def poll_seconds(waited: float) -> float:
    """How long to sleep before looking again: a small part of what was waited already.

    So whoever waits is late by a few per cent at most, and asks less often the longer it takes.
    """
    shortest, longest = _POLL_SECONDS
    return min(max(shortest, _POLL_SHARE * waited), longest)


def wait_until(
    is_there: Callable[[], bool],
    rank: int,
    waiting_for: Callable[[], str],
    timeout: float,
    in_vain: Callable[[], RankFailure],
) -> None:
    """Return when ``is_there`` says so.

    Args:
        is_there: Looks; it may raise.
        rank: Of this process.
        waiting_for: What it waits for, said every ten seconds.
        timeout: Seconds.
        in_vain: Makes the error that is raised then.
    """
    start = time.monotonic()
    next_line = start + _PROGRESS_SECONDS
    while not is_there():
        now = time.monotonic()
        if now - start > timeout:
            raise in_vain()
        if now > next_line:
            progress(f"rank {rank} has waited {now - start:.0f} s for {waiting_for()}")
            next_line = now + _PROGRESS_SECONDS
        time.sleep(poll_seconds(now - start))


def named(ranks: Sequence[int]) -> str:
    """What ranks are called in messages, at most eight of them."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def timeout_error(rank: int, timeout: float, what: str) -> RankFailure:
    """The error of a rank that waited in vain."""
    return RankFailure(
        f"rank {rank} waited {timeout:.0f} s for {what}, in vain; see what holds it up, or raise "
        "--agreement-timeout"
    )


def alone_error(rank: int, name: str) -> RankFailure:
    """The error of a rank whose number was there before, while the others did not come again."""
    return RankFailure(
        f"rank {rank} joined a second time: it was restarted alone, and knows nothing of "
        "what the others trained; restart all ranks from the last checkpoint (or two "
        f"exchanges of this job have the name {name!r}: give each its own)"
    )


def exchange_prefix(name: str) -> str:
    """Where in a store the exchange of that name has its keys."""
    return f"megatron_dynbatch/{name}"


def end_exchange(store: dist.Store, name: str, rank: int, error: RankFailure) -> None:
    """Tell whoever still is in an exchange of an error, unless it has ended by another one."""
    exchange = dist.PrefixStore(exchange_prefix(name), store)
    if not exchange.check([FAILED]):
        exchange.set(FAILED, f"rank {rank}: {error}")

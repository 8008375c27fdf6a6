"""torch's own names in the store of torchrun carry the attempt too, while a run has begun.

torchrun keeps its store while it starts all ranks again, and torch (seen with 2.14) names what the
backends leave there the same in every attempt: a rank that starts early reads where a dead one
listened, or a dead NCCL id, and the new attempt ends before Megatron begins (pytorch issue 135712).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_dynbatch.steps.attempt import join_attempt

_TIMEOUT = timedelta(minutes=10)  # Megatron gives its own

_original: Callable[..., Any] | None = None
_ours: Callable[..., Any] | None = None


def install_rendezvous() -> None:
    """Let process groups that are made over torchrun's store find only ranks of their attempt."""
    global _original, _ours
    if _ours is None:
        _original, _ours = dist.init_process_group, _within_attempt(dist.init_process_group)
        dist.init_process_group = _ours


def uninstall_rendezvous() -> None:
    """Put torch's function back; where somebody has wrapped ours since, it passes calls through."""
    global _original, _ours
    if _ours is not None and dist.init_process_group is _ours:
        dist.init_process_group = _original  # type: ignore[assignment]
        _original = _ours = None


def _within_attempt(initialise: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(initialise)
    def init_process_group(*positional: Any, **named: Any) -> Any:
        if not _shares_the_launchers_store(positional, named):
            return initialise(*positional, **named)
        timeout = named.get("timeout") or _TIMEOUT
        size, own_rank = named.get("world_size", -1), named.get("rank", -1)
        store, rank, world_size = next(
            dist.rendezvous("env://", own_rank, size, timeout=timeout)
        )
        store.set_timeout(timeout)
        own = join_attempt(
            store, rank, world_size, timeout=timeout.total_seconds(), name="process group"
        )
        return initialise(
            *positional, **{**named, "store": own, "rank": rank, "world_size": world_size}
        )

    return init_process_group


def _shares_the_launchers_store(positional: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether torch would take the store of torchrun's agent."""
    backend = positional[0] if positional else named.get("backend")
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and len(positional) <= 1  # Megatron names all
        and not named.get("store")
        and named.get("init_method") in (None, "env://")
        and backend not in ("mpi", "fake")
    )

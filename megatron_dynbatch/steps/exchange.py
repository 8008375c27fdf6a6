"""Messages between the ranks of a job, through its key-value store.

Used only at batch boundaries. Nothing here is a collective of the training's process groups: a rank
that fails, or never arrives, is named to the others instead of hanging them. Waiting has its own
time-out, because an agentic batch may take longer than a collective is allowed to.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_dynbatch.steps.attempt import join_attempt
from megatron_dynbatch.steps.waiting import (
    FAILED,
    GRACE_SECONDS,
    RankFailure,
    alone_error,
    exchange_prefix,
    named,
    timeout_error,
    wait_until,
)
from megatron_dynbatch.steps.waiting import poll_seconds as poll_seconds

_POLL_SECONDS = 0.05
_LINGER_SECONDS = 2.0
# One wrong option may change many others; the first fields name it.
_MOST_FIELDS = 8
_LONGEST_VALUE = 120


class Exchange:
    """Rank 0 tells the others, and all ranks compare what they know.

    Every rank must make the same calls in the same order. A message is a JSON-serialisable value.

    Args:
        store: Any ``torch.distributed.Store`` that all ranks share.
        rank: Of this process, 0 ≤ rank < world_size.
        world_size: Number of processes that take part.
        timeout: Seconds that a rank waits for the others' part of one call.
        name: Distinguishes several exchanges over one store.

    Raises:
        RankFailure: The rank was there before: its process was restarted, and the others were not.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, *, timeout: float, name: str = "0"
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._store = dist.PrefixStore(exchange_prefix(name), store)
        self._calls = 0
        self._own_keys: list[tuple[int, str]] = []
        self._has_heard = False
        if self._store.add(f"joined/{rank}", 1) > 1:
            error = alone_error(rank, name)
            self.fail(error)
            raise error

    @classmethod
    def alone(cls) -> Exchange:
        """An exchange for a single process."""
        return cls(dist.HashStore(), 0, 1, timeout=60.0)

    @classmethod
    def of_job(cls, *, timeout: float, name: str) -> Exchange:
        """Over the store of the initialised ``torch.distributed`` job; every rank must call it.

        What earlier attempts left in the store has no part in it (see `attempt`).

        Raises:
            RankFailure: Not all ranks called it, or this one was restarted alone.
        """
        # torch offers no public accessor for the store that init_process_group made.
        store = dist.distributed_c10d._get_default_store()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = join_attempt(store, rank, world_size, timeout=timeout, name=name)
        return cls(own, rank, world_size, timeout=timeout, name=name)

    def broadcast(self, make: Callable[[], Any], waiting_for: str, timeout: float) -> Any:
        """Return on every rank what ``make`` returns on rank 0.

        Args:
            make: Called on rank 0 only.
            waiting_for: What the other ranks say they wait for.
            timeout: Seconds that the other ranks wait; longer than ``make`` may take.

        Raises:
            RankFailure: On the other ranks, if rank 0 failed or did not answer in time.
        """
        key = self._next("broadcast")
        if self.rank == 0:
            with self.failing():
                message = make()
            self._set(key, json.dumps(message))
            return message
        return json.loads(self._get(key, waiting_for, timeout))

    def compare(
        self, facts: Mapping[str, str], peer_facts: Mapping[str, str] | None = None
    ) -> None:
        """Return only if all ranks agree.

        Args:
            facts: Field → value; all ranks give the same fields and values.
            peer_facts: Field → value that is equal on those ranks that give the field.

        Raises:
            RankFailure: On every rank, naming each field with the ranks that have each value, or
                the ranks that did not arrive.
        """
        key = self._next("compare")
        self._set(f"{key}/{self.rank}", json.dumps([dict(facts), dict(peer_facts or {})]))
        if self.rank == 0:
            with self.failing():
                self._wait_for_all(key, self.timeout)
                self._compare_all(key)
            self._forget(self._calls)
            self._set(f"{key}/equal", "")
        else:
            # Rank 0 gives up first, and tells which ranks are missing.
            self._wait(
                [f"{key}/equal"],
                lambda _: self._whom_all_wait_for(key),
                self.timeout + GRACE_SECONDS,
            )
            self._forget(self._calls + 1)

    def arrive(self, waiting_for: str) -> None:
        """Return when rank 0 has come to the same place.

        Raises:
            RankFailure: It did not within the time-out, or some rank failed.
        """
        self.broadcast(lambda: None, waiting_for, self.timeout)

    def post(self, name: str, message: Any) -> None:
        """Leave a message that other ranks may look for at any time (also from another thread)."""
        self._store.set(f"post/{name}", json.dumps(message))

    def look(self, name: str) -> Any:
        """The message that was posted under ``name``, or None; never waits."""
        if not self._store.check([f"post/{name}"]):
            return None
        return json.loads(self._store.get(f"post/{name}"))

    def take_down(self, name: str) -> None:
        """Delete a posted message."""
        self._store.delete_key(f"post/{name}")

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error here; they raise it at their next wait.

        Returns when those that wait now have heard of it: the launcher ends all ranks when the
        first one exits, and each of them should have named the error before.
        """
        if self._store.check([FAILED]):  # the first error is the cause
            return
        kind = "" if isinstance(error, RankFailure) else f"{type(error).__name__}: "
        self._store.set(FAILED, f"rank {self.rank}: {kind}{error}")
        deadline = time.monotonic() + _LINGER_SECONDS
        while self._store.add("heard", 0) < self.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def failure(self) -> str | None:
        """What a rank has failed with, or None; never waits, and may be asked from a thread."""
        if not self._store.check([FAILED]):
            return None
        if not self._has_heard:
            self._has_heard = True
            self._store.add("heard", 1)
        return self._store.get(FAILED).decode()

    def failing(self) -> _Failing:
        """Context in which an error is told to the other ranks before it propagates."""
        return _Failing(self)

    def _wait_for_all(self, key: str, timeout: float) -> None:
        self._wait(
            [f"{key}/{rank}" for rank in range(self.world_size)],
            lambda missing: f"{named(missing)} to read the rollout batch and compare plans",
            timeout,
        )

    def _whom_all_wait_for(self, key: str) -> str:
        missing = self._missing([f"{key}/{rank}" for rank in range(self.world_size)])
        if not missing:
            return "rank 0 to compare all ranks"
        return f"{named(missing)} to read the rollout batch and compare plans"

    def _compare_all(self, key: str) -> None:
        ranks = range(self.world_size)
        texts = self._store.multi_get([f"{key}/{rank}" for rank in ranks])
        told = [json.loads(text.decode()) for text in texts]
        # Field → value → ranks; a rank that lacks a field of all has the value None.
        found: dict[str, dict[str | None, list[int]]] = {}
        for field in dict.fromkeys(field for facts, _ in told for field in facts):
            for rank, (facts, _) in enumerate(told):
                found.setdefault(field, {}).setdefault(facts.get(field), []).append(rank)
        for rank, (_, peer_facts) in enumerate(told):
            for field, value in peer_facts.items():
                found.setdefault(field, {}).setdefault(value, []).append(rank)
        differing = {field: values for field, values in found.items() if len(values) > 1}
        if differing:
            listed = [
                _told(field, values) for field, values in list(differing.items())[:_MOST_FIELDS]
            ]
            if len(differing) > _MOST_FIELDS:
                listed.append(f"{len(differing) - _MOST_FIELDS} more fields")
            raise RankFailure(
                f"ranks disagree: {'; '.join(listed)}; start all ranks with the same options, "
                "package version and view of the rollout directory"
            )

    def _next(self, kind: str) -> str:
        self._calls += 1
        return f"{self._calls}/{kind}"

    def _set(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._own_keys.append((self._calls, key))

    def _forget(self, calls: int) -> None:
        """Delete own keys of the calls before ``calls``: a comparison shows that all were read."""
        for call, key in self._own_keys:
            if call < calls:
                self._store.delete_key(key)
        self._own_keys = [(call, key) for call, key in self._own_keys if call >= calls]

    def _get(self, key: str, waiting_for: str, timeout: float) -> str:
        self._wait([key], lambda missing: waiting_for, timeout)
        return self._store.get(key).decode()

    def _wait(
        self, keys: Sequence[str], waiting_for: Callable[[list[int]], str], timeout: float
    ) -> None:
        """Wait until all keys are there; ``waiting_for`` describes the places of missing ones."""
        def is_there() -> bool:
            if self._store.check(list(keys)):
                return True
            if not self._store.check([FAILED]):
                return False
            # Who has told all may go on, and end this exchange, before its last word is read.
            if self._store.check(list(keys)):
                return True
            raise RankFailure(str(self.failure()))

        def in_vain() -> RankFailure:
            error = timeout_error(self.rank, timeout, waiting_for(self._missing(keys)))
            self.fail(error)
            return error

        wait_until(
            is_there,
            self.rank,
            lambda: waiting_for(self._missing(keys)),
            timeout,
            in_vain,
        )

    def _missing(self, keys: Sequence[str]) -> list[int]:
        """Places of the keys that are not there."""
        return [place for place, key in enumerate(keys) if not self._store.check([key])]


class _Failing:
    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.exchange.fail(error)


def _told(field: str, values: Mapping[str | None, Sequence[int]]) -> str:
    """Which ranks have which value of a field."""
    parts = [f"{_shortened(value)} on {named(ranks)}" for value, ranks in values.items()]
    return f"{field} is {' but '.join(parts)}"


def _shortened(value: str | None) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"

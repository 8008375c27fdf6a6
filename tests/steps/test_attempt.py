"""Ranks are threads over one store that is never emptied, as torchrun's agent keeps it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.steps import Exchange, RankFailure, attempt, exchange
from megatron_dynbatch.steps.attempt import join_attempt
from megatron_dynbatch.steps.waiting import FAILED


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(exchange, "_LINGER_SECONDS", 0.0)


def join(
    store: dist.Store,
    ranks: Sequence[int],
    size: int,
    timeout: float = 600.0,
    between: Callable[[], None] = lambda: None,
) -> list[Any]:
    """What each rank gets, or raises; they come in this order, `between` the first two a pause."""
    results: list[Any] = [None] * len(ranks)

    def run(place: int, rank: int) -> None:
        try:
            results[place] = join_attempt(store, rank, size, timeout=timeout, name="a")
        except RankFailure as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(ranks)]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 0:
            between()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def are_one_attempt(stores: Sequence[dist.Store]) -> bool:
    """Whether what the first one says is heard by all."""
    stores[0].set("hello", "yes")
    return all(store.check(["hello"]) for store in stores)


@settings(max_examples=30, deadline=None)
@given(
    before=st.lists(
        st.integers(1, 4).flatmap(
            lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))
        ),
        max_size=4,
    ),
    order=st.permutations(range(3)),
)
def test_whatever_earlier_attempts_left_all_ranks_find_each_other(
    before: list[tuple[int, set[int]]], order: list[int]
) -> None:
    store = dist.HashStore()
    earlier: list[dist.Store] = []
    for size, came in before:  # some ranks died before they came
        found = join(store, sorted(came), size, timeout=0.02 if len(came) < size else 600.0)
        assert all(isinstance(f, RankFailure) == (len(came) < size) for f in found)
        earlier += [f for f in found if not isinstance(f, RankFailure)]
    joined = join(store, order, 3)
    assert are_one_attempt(joined)
    assert not any(one.check(["hello"]) for one in earlier)


def test_a_late_member_of_a_dead_attempt_is_not_heard() -> None:
    store = dist.HashStore()
    dead = [
        Exchange(one, rank, 2, timeout=600.0) for rank, one in enumerate(join(store, [0, 1], 2))
    ]
    alive = [
        Exchange(one, rank, 2, timeout=600.0)
        for rank, one in enumerate(join(store, [1, 0], 2)[::-1])
    ]
    dead[1].fail(OSError("the disk is gone"))
    dead[1].post("0/0", "a batch of then")
    dead[1]._set("1/compare/1", "[]")
    assert alive[0].look("0/0") is None
    agreed: list[None] = []
    thread = threading.Thread(target=lambda: agreed.append(alive[0].compare({"plan": "a"})))
    thread.start()
    alive[1].compare({"plan": "a"})
    thread.join(60)
    assert agreed == [None]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_comes_back_alone_ends_all(alone: int) -> None:
    store = dist.HashStore()
    joined = join(store, [0, 1], 2)
    survivor = Exchange(joined[1 - alone], 1 - alone, 2, timeout=600.0, name="a")
    told: list[str] = []

    def wait() -> None:
        try:
            survivor.compare({"plan": "a"})
        except RankFailure as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    (error,) = join(store, [alone], 2, timeout=0.5)
    thread.join(60)
    sentence = f"rank {alone} joined a second time: it was restarted alone"
    assert sentence in str(error)
    assert len(told) == 1 and sentence in told[0]


def test_ranks_that_do_not_come_are_named() -> None:
    first, third = join(dist.HashStore(), [0, 2], 4, timeout=0.05)
    assert "rank 0 waited 0 s for ranks 1, 3 to start, in vain" in str(first)
    assert "rank 2 waited 0 s for all ranks to start, rank 0 first, in vain" in str(third)


def test_a_rank_that_came_before_rank_0_of_a_new_attempt_waits_for_it() -> None:
    store = dist.HashStore()
    join(store, [0, 1], 2)
    came = threading.Event()
    lobby = dist.PrefixStore("megatron_dynbatch/attempts/a", store)
    leader = lobby.get("leader").decode()

    def until_the_dead_attempt_is_told() -> None:
        key = f"{leader}/megatron_dynbatch/a/{FAILED}"
        while not lobby.check([key]):
            came.wait(0.001)

    assert are_one_attempt(join(store, [1, 0], 2, between=until_the_dead_attempt_is_told))

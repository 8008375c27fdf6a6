"""Ranks are threads over one in-process store: what matters is the order of messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from megatron_dynbatch.steps import Exchange, RankFailure


def on_ranks(count: int, body: Callable[[Exchange], Any], timeout: float = 600.0) -> list[Any]:
    """What ``body`` returns, or raises, on each rank."""
    store = dist.HashStore()
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = body(Exchange(store, rank, count, timeout=timeout))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return results


def test_broadcast_gives_rank_0s_value_everywhere() -> None:
    def body(exchange: Exchange) -> list[Any]:
        return [exchange.broadcast(lambda n=n: {"n": n}, "it", 600.0) for n in range(20)]

    assert on_ranks(3, body) == [[{"n": n} for n in range(20)]] * 3


def test_make_runs_on_rank_0_only() -> None:
    calls: list[int] = []

    def body(exchange: Exchange) -> None:
        exchange.broadcast(lambda: calls.append(exchange.rank), "it", 600.0)

    on_ranks(3, body)
    assert calls == [0]


def test_an_error_on_rank_0_is_raised_on_all_ranks() -> None:
    def body(exchange: Exchange) -> None:
        def make() -> None:
            raise ValueError("row 3 is damaged")

        exchange.broadcast(make, "the plan", 600.0)

    first, *others = on_ranks(3, body)
    assert isinstance(first, ValueError)
    assert [str(e) for e in others] == ["rank 0: ValueError: row 3 is damaged"] * 2


def test_an_error_on_another_rank_ends_everyones_wait() -> None:
    def body(exchange: Exchange) -> None:
        if exchange.rank == 2:
            exchange.fail(OSError("disk gone"))
            raise OSError("disk gone")
        exchange.compare({"plan": "a"})

    results = on_ranks(3, body)
    assert [str(e) for e in results] == ["rank 2: OSError: disk gone"] * 2 + ["disk gone"]


@pytest.mark.parametrize("odd", [0, 1, 3])
def test_a_disagreement_is_an_error_on_all_ranks_naming_field_and_ranks(odd: int) -> None:
    def body(exchange: Exchange) -> None:
        exchange.compare({"plan": "b" if exchange.rank == odd else "a", "version": "1"})

    results = on_ranks(4, body)
    assert all(isinstance(error, RankFailure) for error in results)
    for error in results:
        assert "plan is" in str(error) and "version" not in str(error).split(";")[0]
        named = "ranks 1, 2, 3" if odd == 0 else f"rank {odd}"
        assert f"on {named}" in str(error)


def test_a_missing_rank_is_named_after_the_timeout() -> None:
    came = threading.Event()

    def body(exchange: Exchange) -> None:
        if exchange.rank == 0:
            assert came.wait(60)
        exchange.timeout = 0.05 if exchange.rank == 0 else 600.0
        if exchange.rank == 1:
            tell = exchange._set
            exchange._set = lambda *words: (tell(*words), came.set())[0]  # type: ignore[method-assign]
        if exchange.rank != 2:
            exchange.compare({"plan": "a"})

    first, second, _ = on_ranks(3, body)
    for error in (first, second):
        assert "waited 0 s for rank 2 to read the rollout batch" in str(error)


def test_keys_that_all_ranks_have_read_are_deleted() -> None:
    store = dist.HashStore()

    def run(rank: int) -> None:
        exchange = Exchange(store, rank, 2, timeout=600.0)
        for n in range(50):
            exchange.broadcast(lambda n=n: n, "it", 600.0)
            exchange.compare({"n": str(n)})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.num_keys() <= 8


def test_a_rank_that_restarts_alone_ends_the_job_on_all_ranks() -> None:
    store = dist.HashStore()
    results: list[Any] = [None, None]

    def survivor() -> None:
        exchange = Exchange(store, 0, 2, timeout=600.0)
        exchange.broadcast(lambda: "batch 0", "it", 600.0)
        try:
            exchange.compare({"plan": "a"})
        except RankFailure as error:
            results[0] = str(error)

    thread = threading.Thread(target=survivor)
    thread.start()
    assert Exchange(store, 1, 2, timeout=600.0).broadcast(str, "it", 600.0) == "batch 0"
    with pytest.raises(RankFailure, match="rank 1 joined a second time: it was restarted alone"):
        Exchange(store, 1, 2, timeout=600.0)
    thread.join(60)
    assert results[0] is not None and "restarted alone" in results[0]


def test_a_word_to_all_is_heard_although_the_exchange_ended_right_after_it() -> None:
    """Rank 0 may answer, go on and begin anew between two looks of a slow rank."""
    exchange = Exchange(dist.HashStore(), 1, 2, timeout=600.0)
    store = exchange._store

    class Overtaken:
        def check(self, keys: list[str]) -> bool:
            if keys == ["failed"] and not store.check(keys):
                store.set("1/broadcast", '"the end"')
                store.set("failed", "rank 0: rank 0 joined a second time")
            return store.check(keys)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    exchange._store = Overtaken()  # type: ignore[assignment]
    assert exchange.broadcast(str, "it", 600.0) == "the end"

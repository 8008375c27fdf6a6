"""Planted disagreements on real ranks: an error on every rank that names ranks and field."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps import Cursor, Exchange, StepFeed
from megatron_dynbatch.steps.next_batch import NextBatch
from tests.harness import launch
from tests.parity.job import OWN_SCRIPT, Cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe
from tests.parity.rollouts import CAPACITY, make_steps, write_batches
from tests.pool import run_ranks

RANKS = 4  # dp 2 × pp 2: rank r is DP rank r % 2 on stage r // 2
LAYOUT = ParallelLayout(dp=2, pp=2)
OPTIONS = PlanOptions(max_tokens_per_gpu=16, rollouts_per_step=4)


def samples(first_token: int) -> list[Sample]:
    return [
        Sample([first_token, 1, 2 + n], loss_mask=[1, 0], rollout_id=n, advantage=1.0)
        for n in range(4)
    ]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`now` and `stale` have the same lengths and ids; `mixed` has a part of each."""
    root = tmp_path_factory.mktemp("rollouts")
    for name, token in (("now", 5), ("stale", 6), ("mixed", 5)):
        RolloutDirectory(root / name).write(samples(token))
    part = "batch-00000000/part-00000.parquet"
    (root / "mixed" / part).write_bytes((root / "stale" / part).read_bytes())
    return root


class OtherPlan(Exchange):
    """A rank that is told another plan than the others."""

    def look(self, name: str) -> Any:
        message = super().look(name)
        if message is not None:
            message["plan"] = message["plan"].replace('"leftover":"partial"', '"leftover":"even"')
        return message


def _read_as(change: Callable[[Sample], Sample]) -> Callable[[StepFeed], None]:
    """A rank that reads something else than the files hold."""

    def plant(feed: StepFeed) -> None:
        read = feed.source.read
        feed.source.read = lambda *args: [  # type: ignore[method-assign]
            change(sample) for sample in read(*args)
        ]

    return plant


def _version(feed: StepFeed) -> None:
    from megatron_dynbatch.steps import agreement as module

    module.__version__ = "0.0.1"


def _option(feed: StepFeed) -> None:
    feed._next._options = replace(OPTIONS, loss_reduction="sample")


def _flag(feed: StepFeed) -> None:
    feed._next._config = replace(feed.config, job_facts={"--lr": "0.02"})


def _layout(feed: StepFeed) -> None:
    feed._next._layout = replace(LAYOUT, vpp=2)


def _nothing(feed: StepFeed) -> None:
    pass


@dataclass(frozen=True)
class Planted:
    """One rank that differs.

    Attributes:
        odd: Which rank.
        plant: Changes its feed.
        says: What the error of every rank contains.
        directory: Where it reads.
        exchange: Its class of exchange.
    """

    odd: int
    plant: Callable[[StepFeed], None]
    says: tuple[str, ...]
    directory: str = "now"
    exchange: type[Exchange] = Exchange


FIRST = "on ranks 0, 1, 3 but"
PLANTED = {
    "another plan": Planted(2, _nothing, ("plan is", FIRST, "on rank 2"), exchange=OtherPlan),
    "another option": Planted(
        3,
        _option,
        ("option loss_reduction is 'rollout' on ranks 0, 1, 2 but 'sample' on rank 3",),
    ),
    "another option on rank 0": Planted(
        0,
        _option,
        ("option loss_reduction is 'sample' on rank 0 but 'rollout' on ranks 1, 2, 3",),
    ),
    "another flag": Planted(1, _flag, ("--lr is '0.01' on ranks 0, 2, 3 but '0.02' on rank 1",)),
    "another layout": Planted(2, _layout, (f"layout vpp is '1' {FIRST} '2' on rank 2",)),
    "another package version": Planted(
        1, _version, ("package version is", "on ranks 0, 2, 3 but '0.0.1' on rank 1")
    ),
    "a stale directory": Planted(
        3, _nothing, ("rollout files is", "on ranks 0, 1, 2 but", "on rank 3"), directory="stale"
    ),
    "a stale file": Planted(
        3,
        _nothing,
        ("rank 3: RolloutDataError:", "part-00000.parquet is not the file that was written"),
        directory="mixed",
    ),
    # Ranks 1 and 3 are DP rank 1; the others have other samples.
    "other tokens": Planted(
        3,
        _read_as(lambda sample: replace(sample, tokens=sample.tokens + 1)),
        ("tokens of DP rank 1 is", "on rank 1 but", "on rank 3"),
    ),
    "other token weights": Planted(
        1,
        _read_as(lambda sample: replace(sample, loss_mask=[0, 1])),
        ("token weights of DP rank 1 is", "on rank 1 but", "on rank 3"),
    ),
    "other advantages": Planted(
        2,
        _read_as(lambda sample: replace(sample, advantage=-1.0)),
        ("advantages, log-probs and values of DP rank 0 is", "on rank 0 but", "on rank 2"),
    ),
}


def meet(root: Path) -> dict[str, str]:
    """What this rank raises in every case, one after the other; the odd rank comes last."""
    alone = StepFeed(RolloutDirectory(root / "now"), LAYOUT, OPTIONS)
    alone.open_step()  # what is imported at first use is not part of the wait
    alone.close()
    return {name: _meet(root, name, case) for name, case in PLANTED.items()}


def _meet(root: Path, name: str, case: Planted) -> str:
    from megatron_dynbatch._version import __version__
    from megatron_dynbatch.steps import agreement as module

    module.__version__ = __version__
    rank = dist.get_rank()
    is_odd = rank == case.odd
    exchange = (case.exchange if is_odd else Exchange).of_job(timeout=600.0, name=name)
    feed = StepFeed(
        RolloutDirectory(root / (case.directory if is_odd else "now")),
        LAYOUT,
        OPTIONS,
        dp_rank=rank % 2,
        exchange=exchange,
        job_facts={"--lr": "0.01"},
    )
    store = dist.PrefixStore(f"waits/{name}", dist.distributed_c10d._get_default_store())
    if is_odd:
        case.plant(feed)
        store.wait([str(other) for other in range(RANKS) if other != rank])
    else:
        store.set(str(rank), "")
    try:
        feed.open_step()
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    feed.close()
    dist.barrier()
    return error


@pytest.fixture(scope="module")
def outcomes(rollouts: Path) -> list[dict[str, str]]:
    return run_ranks(RANKS, meet, rollouts, timeout=280)


@pytest.mark.parametrize("name", PLANTED)
def test_every_rank_names_the_field_and_the_ranks(
    name: str, outcomes: list[dict[str, str]]
) -> None:
    odd = PLANTED[name].odd
    for rank, outcome in enumerate(outcomes):
        error = outcome[name]
        said = error if rank != odd else f"rank {odd}: {error}"
        for part in PLANTED[name].says:
            assert part in said, f"rank {rank}: {error}"
        assert "in vain" not in error  # it was heard of, and not waited for until a time-out


class StoppedClock:
    """Stands still until all of these ranks wait; then every look takes seven seconds."""

    def __init__(self, name: str, ranks: list[int]) -> None:
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"clock/{name}", store)
        self._keys = [str(rank) for rank in ranks]
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._store.set(str(dist.get_rank()), "")
        time.sleep(seconds)
        self._now += 7.0 if self._store.check(self._keys) else 0.0


def miss(root: Path, missing: int) -> tuple[str, str]:
    """One rank comes too late; what the others print and raise."""
    from megatron_dynbatch.steps import waiting as module

    rank = dist.get_rank()
    printed = io.StringIO()
    exchange = Exchange.of_job(timeout=60.0, name=f"missing {missing}")
    others = [other for other in range(RANKS) if other != missing]
    module.time = StoppedClock(str(missing), others)  # type: ignore[assignment]
    error = ""
    if rank != missing:
        feed = StepFeed(
            RolloutDirectory(root / "now"), LAYOUT, OPTIONS, dp_rank=rank % 2, exchange=exchange
        )
        with contextlib.redirect_stdout(printed):
            try:
                feed.open_step()
            except Exception as raised:
                error = str(raised)
        feed.close()
    dist.barrier()
    return printed.getvalue(), error


@pytest.mark.parametrize(
    ("missing", "who"),
    [(2, "rank 2 to read the rollout batch and compare plans"), (0, "rank 0 to come to rollout")],
)
def test_a_missing_rank_is_named_while_it_is_waited_for_and_at_the_end(
    missing: int, who: str, rollouts: Path
) -> None:
    for rank, (printed, error) in enumerate(run_ranks(RANKS, miss, rollouts, missing)):
        if rank != missing:
            assert f"rank {rank} has waited" in printed and who in printed
            assert who in error and "raise --agreement-timeout" in error


def train_late(argv: list[str]) -> str:
    """Rank 1 comes to the second batch when rank 0 has given up: how each rank ended."""
    from megatron_dynbatch import hooks

    hooks.install()
    agreed = NextBatch.get

    def late(batches: NextBatch, cursor: Cursor, on_batch_needed: Any) -> Any:
        exchange = batches._exchange
        assert exchange.timeout == 240.0
        if cursor.batch_id == 1:
            exchange.timeout = 0.2
            while dist.get_rank() == 1 and exchange.failure() is None:
                time.sleep(0.01)
        return agreed(batches, cursor, on_batch_needed)

    NextBatch.get = late  # type: ignore[method-assign]
    try:
        launch(OWN_SCRIPT, argv)
        error = "none"
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        NextBatch.get = agreed  # type: ignore[method-assign]
    return error


def test_a_training_ends_on_every_rank_when_one_does_not_come_in_time(tmp_path: Path) -> None:
    write_batches(tmp_path / "rollouts", make_steps((4, 3, 5)))
    flags = {
        "dynamic-global-batch": True,
        "rollout-path": tmp_path / "rollouts",
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": CAPACITY,
        "train-samples": 12,
        "agreement-timeout": 240,
        **Layout(dp=2).flags(),
    }
    argv = Cell(2, flags, Recipe(decay=20, clip_grad=0.0), script=OWN_SCRIPT).argv()
    missing, told = run_ranks(2, train_late, argv)
    assert "rank 1 to read the rollout batch and compare plans" in missing
    assert "raise --agreement-timeout" in missing
    assert "rank 0" in told and missing.partition(": ")[2].splitlines()[0] in told

"""Stopped at any durable write, however, a job goes on by itself as if nothing had been.

`make kills` runs every place; else a third of the jobs, chosen by the commit (or KILLS_PART=0 to 2)
and printed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_dynbatch.failpoints import WRITES
from megatron_dynbatch.rollouts import RolloutDirectory
from megatron_dynbatch.steps.ledger import imbalance, read_ledger
from tests.pool import ROOT
from tests.reliability.killed_training import MEGATRONS
from tests.reliability.kills import (
    BATCHES,
    MENDER,
    NUM_STEPS,
    TOTAL,
    TRAINER,
    Chain,
    Row,
    chains,
    prepare,
    rows,
    run,
    start,
    write_rollouts,
    write_under_fire,
)
from tests.reliability.writers_under_fire import places

PARTS = 3
WRITERS = Chain((), ranks=2)
"""A job whose rollouts come from writers that died."""


def part() -> int | None:
    """Which part of the jobs this commit runs; None: all."""
    if os.environ.get("KILLS") == "full":
        return None
    if "KILLS_PART" in os.environ:
        return int(os.environ["KILLS_PART"])
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return int(head.stdout.strip() or "0", 16) % PARTS


ALL = chains()
CASES = ALL if part() is None else ALL[part() :: PARTS]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills") / "rollouts"
    write_rollouts(path)
    return path


@pytest.fixture(scope="module")
def jobs(
    rollouts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Chain, Future[Path]]]:
    """Folders of all jobs, two of which run at a time."""
    print(f"kills: {'all' if part() is None else f'part {part()} of {PARTS}'}, {len(CASES)} jobs")

    def job(source: Path, chain: Chain) -> Path:
        folder = tmp_path_factory.mktemp("job")
        run(source, folder, chain)
        return folder

    under_fire = tmp_path_factory.mktemp("writers") / "rollouts"
    write_under_fire(under_fire)
    whole = {Chain((), 1), Chain((), 2)}
    with ThreadPoolExecutor(2) as pool:
        futures = {chain: pool.submit(job, rollouts, chain) for chain in [*whole, *CASES]}
        futures[WRITERS] = pool.submit(job, under_fire, WRITERS)
        yield futures
        for future in futures.values():
            future.cancel()


def check_like_uninterrupted(found: list[Row], wanted: list[Row]) -> None:
    """Steps after a checkpoint are logged again; every word on each is that of the whole run."""
    assert [row.iteration for row in wanted] == list(range(1, NUM_STEPS + 1))
    assert {row.iteration for row in found} == set(range(1, NUM_STEPS + 1))
    assert found[-1].iteration == NUM_STEPS
    for row in found:
        assert row == wanted[row.iteration - 1]


def check_rollouts(folder: Path, rollouts: Path, *, is_async: bool = False) -> None:
    """Each was trained once, and what is trained beyond a checkpoint is gone."""
    # An asynchronous checkpoint may be completed only when training has ended.
    num_kept = 3 if is_async else 2
    entries = read_ledger(folder / "ledger.jsonl")
    assert imbalance(entries, RolloutDirectory(rollouts), len(BATCHES)) == []
    assert sum(len(entry.consumed) for entry in entries) == TOTAL
    for slot in sorted((folder / "rollouts").glob("batch-*"))[: len(BATCHES) - num_kept]:
        assert {path.name for path in slot.iterdir()} <= {"DELETED", "key"}, slot
    left = [path.name for path in (folder / "rollouts").rglob(".tmp-*")]
    assert left == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chain", CASES, ids=str)
def test_a_killed_job_goes_on_as_if_nothing_had_been(
    chain: Chain, jobs: dict[Chain, Future[Path]], rollouts: Path
) -> None:
    wanted = rows(jobs[Chain((), chain.ranks)].result())
    folder = jobs[chain].result()
    check_like_uninterrupted(rows(folder), wanted)
    check_rollouts(folder, rollouts, is_async=chain.is_async)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_scheduler_that_starts_the_same_command_again(
    jobs: dict[Chain, Future[Path]], rollouts: Path, tmp_path: Path
) -> None:
    """Without any restart by torchrun itself, and before and after the first checkpoint."""
    chain = Chain(("forward:after:1:kill:1", "forward:after:9:kill:0"), ranks=2, form="static")
    prepare(rollouts, tmp_path, chain)
    assert [start(tmp_path, chain, restarts=0) != 0 for _ in range(3)] == [True, True, False]
    check_like_uninterrupted(rows(tmp_path), rows(jobs[Chain((), 2)].result()))
    check_rollouts(tmp_path, rollouts)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_writers_that_died_everywhere_feed_the_same_training(
    jobs: dict[Chain, Future[Path]], rollouts: Path
) -> None:
    folder = jobs[WRITERS].result()
    check_like_uninterrupted(rows(folder), rows(jobs[Chain((), WRITERS.ranks)].result()))
    check_rollouts(folder, rollouts)


def test_every_durable_write_is_in_the_matrix() -> None:
    trainers = {*TRAINER, *(name for names in MENDER.values() for name in names)}
    assert trainers | {place.partition(":")[0] for place in places()} == set(WRITES)
    found = [place.replace("_", " ").split(":") for chain in ALL for place in chain.places]
    wanted = {**{name: WRITES[name] for name in trainers}, **MEGATRONS}
    assert {name for name, *_ in found} == set(wanted)
    for name, positions in wanted.items():
        for position in positions:
            actions = {action for n, at, _, action, *_ in found if (n, at) == (name, position)}
            can_be_full = position != "after" and name in {*trainers, "checkpoint", "tracker"}
            assert actions == {"kill", "term", *(["enospc"] if can_be_full else [])}, (
                name,
                position,
            )

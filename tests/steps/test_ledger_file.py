"""A ledger that was stopped at any byte is mended when it is opened, and refused where it cannot be
written."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.failpoints import WRITES
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutQueue, Sample
from megatron_dynbatch.steps import Exchange, StepFeed
from megatron_dynbatch.steps.exchange import RankFailure
from megatron_dynbatch.steps.ledger import Entry, Ledger, imbalance, read_ledger
from megatron_dynbatch.steps.ledger_file import LedgerError
from tests.reliability.writer_kills import stopped

ENTRIES = [Entry(0, step, ((0, step), (0, 9 + step)), trained_tokens=7 * step) for step in range(4)]


def lines(*entries: Entry) -> bytes:
    """As the first version of the ledger wrote them."""
    return b"".join(
        json.dumps(
            {
                "batch_id": e.batch_id, "step_index": e.step_index, "consumed": e.consumed,
                "dropped": e.dropped, "trained_tokens": e.trained_tokens,
            },
            separators=(",", ":"),
        ).encode()
        + b"\n"
        for e in entries
    )  # fmt: skip


@pytest.fixture
def path() -> Iterator[Path]:
    """A ledger's path, in memory where there is such a place."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder) / "ledger.jsonl"


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """No file can grow beyond this size."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_line_torn_at_any_byte_is_mended_and_reported(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, last = lines(*ENTRIES[:2]), lines(ENTRIES[2])
    for size in range(1, len(last)):
        path.write_bytes(whole + last[:size])
        # Only its line end is missing where the whole object is there.
        there = ENTRIES[:3] if size == len(last) - 1 else ENTRIES[:2]
        assert read_ledger(path) == there
        ledger = Ledger(path)
        ledger.open()
        said = capsys.readouterr().out
        assert said.count("\n") == 1
        assert f"{path}: line 3 of the rollout ledger had been torn" in said
        assert path.read_bytes() == lines(*there)
        ledger.append(ENTRIES[2])
        assert read_ledger(path) == ENTRIES[:3]
        ledger.open()
        assert capsys.readouterr().out == ""


def test_a_line_appended_to_a_torn_one_is_not_lost(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the first version of the ledger left when a disk was full for a while."""
    first, torn = lines(ENTRIES[0]), lines(ENTRIES[1])
    for size in range(1, len(torn)):
        path.write_bytes(first + torn[:size] + lines(*ENTRIES[2:]))
        wanted = ENTRIES if size == len(torn) - 1 else [ENTRIES[0], *ENTRIES[2:]]
        assert read_ledger(path) == wanted
        Ledger(path).open()
        assert f"{path}: line 2 of" in capsys.readouterr().out
        assert path.read_bytes() == lines(*wanted)


def test_a_disk_that_is_full_at_any_byte_adds_nothing(path: Path) -> None:
    ledger, before = Ledger(path), lines(*ENTRIES[:2])
    line = lines(ENTRIES[2])[:-2] + b',"source_id":"","stamp":""}\n'
    for size in range(len(line)):
        path.write_bytes(before)
        with full_at(len(before) + size), pytest.raises(LedgerError, match="a line could not be"):
            ledger.append(ENTRIES[2])
        assert path.read_bytes() == before
        ledger.append(ENTRIES[2])
        assert path.read_bytes() == before + line


def live(path: Path) -> None:
    """Mends and writes on: what a run does with its ledger."""
    path.mkdir(exist_ok=True)
    ledger = Ledger(path / "ledger.jsonl")
    ledger.open()
    for entry in ENTRIES:
        ledger.append(entry)


@pytest.mark.parametrize("action", ["kill", pytest.param("enospc", marks=pytest.mark.slow)])
def test_a_run_stopped_at_any_write_of_its_ledger_goes_on(path: Path, action: str) -> None:
    names = [name for name in WRITES if name.startswith("ledger")]
    where = [f"{name}:{at}:1:{action}" for name in names for at in WRITES[name]]
    where += [f"ledger:{at}:3:{action}" for at in WRITES["ledger"]]
    for place in where:
        (path.parent / place).mkdir()
        (path.parent / place / path.name).write_bytes(lines(*ENTRIES[:2]) + b'{"batch_id":0,')
    codes = stopped("tests.steps.test_ledger_file:live", path.parent, where)
    for place in where:
        assert codes[place] == (-signal.SIGKILL if action == "kill" else errno.ENOSPC), place
        found = read_ledger(path.parent / place / path.name)
        assert found == ENTRIES[: len(found)] and len(found) >= 1
        live(path.parent / place)
        assert read_ledger(path.parent / place / path.name) == ENTRIES
        assert [file.name for file in (path.parent / place).iterdir()] == [path.name]
        for line in (path.parent / place / path.name).read_bytes().splitlines():
            assert json.loads(line)["batch_id"] == 0


def test_a_ledger_that_cannot_be_written_is_refused(path: Path) -> None:
    (path.parent / "folder").mkdir()
    for wrong in (path.parent / "none" / "ledger", path.parent / "folder", Path("/proc/version")):
        with pytest.raises(LedgerError, match="the rollout ledger cannot be written") as raised:
            Ledger(wrong).open()
        assert str(wrong) in str(raised.value)
    path.write_bytes(lines(*ENTRIES))
    with full_at(path.stat().st_size), pytest.raises(LedgerError, match="cannot be written"):
        Ledger(path).open()
    assert path.read_bytes() == lines(*ENTRIES)
    Ledger("/dev/null").open()
    Ledger("/dev/null").append(ENTRIES[0])


def test_all_ranks_hear_of_it_before_the_first_step(path: Path) -> None:
    queue = RolloutQueue("q")
    queue.write([Sample([1, 2, 3], 2)])
    store = dist.HashStore()
    options = PlanOptions(max_tokens_per_gpu=16)

    def feed(rank: int) -> StepFeed:
        exchange = Exchange(store, rank, 2, timeout=600.0)
        ledger = Ledger(path.parent / "none" / "ledger")
        return StepFeed(queue, ParallelLayout(dp=2), options, exchange=exchange, ledger=ledger)

    other = feed(1)
    with pytest.raises(LedgerError):
        feed(0)
    with pytest.raises(RankFailure, match="rank 0: LedgerError: .*cannot be written"):
        other.open_step()
    other.close()


def test_a_disk_that_is_full_in_a_step_ends_training_and_nothing_is_lost(path: Path) -> None:
    queue = RolloutQueue("q")
    for number in range(3):
        queue.write([Sample([number, 2, 3], 2)])
    queue.finish()
    options = PlanOptions(max_tokens_per_gpu=16)
    steps = StepFeed(queue, ParallelLayout(), options, ledger=Ledger(path))
    steps.open_step()
    steps.finish_step()
    checkpoint = steps.cursor
    steps.open_step()
    with full_at(path.stat().st_size + 9), pytest.raises(LedgerError, match="a line could not be"):
        steps.finish_step()
    steps.close()
    resumed = StepFeed(queue, ParallelLayout(), options, ledger=Ledger(path))
    resumed.restore(checkpoint)
    while resumed.open_step() is not None:
        resumed.finish_step()
    resumed.close()
    assert imbalance(read_ledger(path), queue, 3) == []


def test_lines_of_other_versions_are_read(path: Path) -> None:
    newer = {
        "batch_id": 0, "step_index": 1, "consumed": [[0, 1]], "dropped": [], "trained_tokens": 2,
        "source": "id", "stamps": {"0": "ab"},
    }  # fmt: skip
    path.write_bytes(lines(ENTRIES[0]) + json.dumps(newer).encode() + b"\n{\"batch")
    assert read_ledger(path) == [ENTRIES[0], Entry(0, 1, ((0, 1),), trained_tokens=2)]
    Ledger(path).open()
    assert json.loads(path.read_bytes().splitlines()[1]) == newer  # nothing of it is lost


@pytest.mark.parametrize(
    "damaged",
    [b"hello\n", b'{"batch_id":0,"step\n', b'{"batch_id":0,"step_index":"1"}\n', b"[1]\n", b"\0\n",
     b'{"batch_id":0,"step_index":0,"consumed":[1],"dropped":[],"trained_tokens":0}\n',
     b'{"batch_id":' + b"9" * 5000 + b"}\n", b"[" * 9999 + b"\n"],
)  # fmt: skip
def test_what_is_no_torn_line_is_an_error_that_names_it(path: Path, damaged: bytes) -> None:
    path.write_bytes(lines(ENTRIES[0]) + damaged + lines(ENTRIES[1]))
    with pytest.raises(LedgerError, match="line 2 is not one of a rollout ledger") as raised:
        read_ledger(path)
    assert str(path) in str(raised.value)
    if b"step_index" not in damaged:  # values are not looked at before training
        with pytest.raises(LedgerError, match="line 2 is not one of"):
            Ledger(path).open()
    assert path.read_bytes() == lines(ENTRIES[0]) + damaged + lines(ENTRIES[1])


@given(
    place=st.integers(0, 200),
    removed=st.integers(0, 30),
    inserted=st.binary(max_size=8) | st.sampled_from([b"\n", b"{", b'{"batch_id"', b"\0"]),
)
def test_no_damage_ends_in_a_foreign_exception(place: int, removed: int, inserted: bytes) -> None:
    whole = lines(*ENTRIES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        path.write_bytes(whole[:place] + inserted + whole[place + removed :])
        try:
            found = read_ledger(path)
        except LedgerError as error:
            assert str(path) in str(error) and "line " in str(error)
        else:
            assert all(isinstance(entry, Entry) for entry in found)

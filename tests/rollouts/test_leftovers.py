"""What dead writers left goes; a writer that lives, stopped or slow, loses nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynbatch import failpoints
from megatron_dynbatch.failpoints import WRITES
from megatron_dynbatch.rollouts import RolloutDirectory, hidden
from megatron_dynbatch.rollouts.hidden import held, hidden_name
from megatron_dynbatch.rollouts.leftovers import LEASE_SECONDS, sweep
from tests.pool import ROOT
from tests.rollouts.helpers import assert_same_samples, golden_samples

OTHER_MACHINE = ".tmp-00000000-x"
OLDER_VERSION = ".tmp-0123456789abcdef0123456789abcdef"


def hidden_names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.startswith(".tmp-"))


def leftover(path: Path, age: float = 0.0) -> Path:
    """A folder with a part in it, last changed some seconds ago."""
    path.mkdir(parents=True)
    (path / "part-00000.parquet").write_bytes(b"x" * 100)
    now = path.stat().st_mtime
    for file in (path / "part-00000.parquet", path):
        os.utime(file, (now - age, now - age))
    return path


def test_a_new_writer_cleans_up_after_dead_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RolloutDirectory(tmp_path).publish("progress", "0")
    for _ in range(3):
        leftover(tmp_path / hidden_name())
    (tmp_path / "notes" / hidden_name()).write_text("half a n")
    with held(leftover(tmp_path / hidden_name())):
        alive = hidden_names(tmp_path)
        RolloutDirectory(tmp_path).write(golden_samples())
        assert len(hidden_names(tmp_path)) == 1 and set(hidden_names(tmp_path)) < set(alive)
    assert os.listdir(tmp_path / "notes") == ["progress"]
    assert capsys.readouterr().out.splitlines() == [
        f"[megatron_dynbatch] 3 leftovers of writers that died are removed from {tmp_path}",
        "[megatron_dynbatch] a leftover of writers that died is removed from "
        f"{tmp_path / 'notes'}",
    ]
    RolloutDirectory(tmp_path).delete_before(0)  # so does retention
    assert hidden_names(tmp_path) == []


@pytest.mark.parametrize("name", [OTHER_MACHINE, OLDER_VERSION])
def test_leftovers_whose_lock_says_nothing_stay_for_a_day(tmp_path: Path, name: str) -> None:
    leftover(tmp_path / name, LEASE_SECONDS - 60)
    now = tmp_path.stat().st_mtime
    sweep(tmp_path, now)
    assert hidden_names(tmp_path) == [name]
    sweep(tmp_path, now + 120)
    assert hidden_names(tmp_path) == []
    old = leftover(tmp_path / name, LEASE_SECONDS + 60)
    (old / "index.parquet").write_bytes(b"")  # something in it is new
    sweep(tmp_path, now)
    sweep(tmp_path)  # nobody says what time it is
    assert hidden_names(tmp_path) == [name]


def test_notes_that_lie_elsewhere_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    other = leftover(tmp_path / "outside" / hidden_name())
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "notes").symlink_to(tmp_path / "outside")
    sweep(tmp_path / "r")
    assert other.exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = leftover(tmp_path / "outside", 2 * LEASE_SECONDS)
    (tmp_path / "r").mkdir()
    for name in (hidden_name(), OTHER_MACHINE):
        (tmp_path / "r" / name).symlink_to(outside)
    inside = leftover(tmp_path / "r" / hidden_name())
    (inside / "link").symlink_to(outside)
    sweep(tmp_path / "r", outside.stat().st_mtime + 3 * LEASE_SECONDS)
    assert os.listdir(outside) == ["part-00000.parquet"]
    assert not inside.exists() and len(hidden_names(tmp_path / "r")) == 2


STOPPED_WRITER = """
import os, signal, sys
from megatron_dynbatch import failpoints
from megatron_dynbatch.rollouts import RolloutDirectory, hidden
from tests.rollouts.helpers import golden_samples
if sys.argv[2] == "elsewhere":
    hidden._kernel = lambda: "00000000"
def stop(name, position):
    if (name, position) == ("manifest", "before"):
        failpoints.arm(None)
        os.kill(os.getpid(), signal.SIGSTOP)
failpoints.reached = stop
print(RolloutDirectory(sys.argv[1]).write(golden_samples(), key="a"))
"""


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_stopped_writer_goes_on(tmp_path: Path, where: str) -> None:
    """One on another machine, stopped for more than a day, fills its folder again."""
    command = [sys.executable, "-c", STOPPED_WRITER, str(tmp_path), where]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert os.WIFSTOPPED(os.waitpid(writer.pid, os.WUNTRACED)[1])
        (own,) = hidden_names(tmp_path)
        for file in (*(tmp_path / own).iterdir(), tmp_path / own):
            os.utime(file, (1e9, 1e9))  # years ago
        assert RolloutDirectory(tmp_path).write(golden_samples()) == 0
        assert hidden_names(tmp_path) == ([own] if where == "here" else [])
        writer.send_signal(signal.SIGCONT)
        assert writer.communicate(timeout=60)[0] == "1\n"
    finally:
        writer.kill()
    reader = RolloutDirectory(tmp_path)
    assert_same_samples(reader.read(1, range(4)), golden_samples())
    assert hidden_names(tmp_path) == []


TAKEN_AT = [
    (name, at)
    for name in ("slot", "part", "index", "manifest", "plan", "key", "batch", "note")
    for at in WRITES[name]
    if at != "middle" and (name, at) not in (("slot", "before"), ("batch", "after"))
    and (name, at) != ("note", "before")
]  # fmt: skip


@pytest.mark.parametrize(("name", "position"), TAKEN_AT)
def test_a_writer_whose_folder_is_taken_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, position: str
) -> None:
    directory = RolloutDirectory(tmp_path)
    directory.publish("progress", "0")
    taken: list[Path] = []

    def take(at: str, when: str) -> None:
        if (at, when) == (name, position) and not taken:
            taken.extend(tmp_path.rglob(".tmp-*"))
            os.rename(taken[0], tmp_path / OTHER_MACHINE)
            if (tmp_path / OTHER_MACHINE).is_dir():
                shutil.rmtree(tmp_path / OTHER_MACHINE)

    monkeypatch.setattr(failpoints, "reached", take)
    assert directory.write(golden_samples(), "plan", key="a") == 0
    directory.publish("progress", "1")
    assert len(taken) == 1
    monkeypatch.undo()
    reader = RolloutDirectory(tmp_path)
    assert_same_samples(reader.read(0, range(4)), golden_samples())
    assert reader.plan_json(0) == "plan" and reader.published("progress") == "1"
    assert reader.write(golden_samples(), key="a") == 0
    assert reader.state(1) == "absent"


def test_a_writer_without_a_directory_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RolloutDirectory(tmp_path / "r")
    directory.publish("progress", "0")

    def remove(name: str, position: str) -> None:
        if name == "index":
            shutil.rmtree(tmp_path / "r", ignore_errors=True)

    monkeypatch.setattr(failpoints, "reached", remove)
    with pytest.raises(FileNotFoundError):
        directory.write(golden_samples())


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows who lives there, so that what is younger than a day stays."""

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(hidden.fcntl, "flock", refuse)
    young = leftover(tmp_path / hidden_name())
    leftover(tmp_path / hidden_name(), LEASE_SECONDS + 60)
    assert RolloutDirectory(tmp_path).write(golden_samples()) == 0
    assert hidden_names(tmp_path) == [young.name]

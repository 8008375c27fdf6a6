"""Deletion goes on from any point, and what fails of it is a line that stops nobody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_dynbatch.failpoints import Failpoint, arm
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory
from tests.reliability.writer_kills import samples


@pytest.fixture
def directory(tmp_path: Path) -> RolloutDirectory:
    """Four batches with plans and keys."""
    directory = RolloutDirectory(tmp_path, open_timeout=0.0)
    for batch in range(4):
        directory.write(samples(batch), "plan", parts=[[0, 1], [2, 3]], key=f"key {batch}")
    return directory


def files(directory: RolloutDirectory, batch: int) -> list[str]:
    return sorted(os.listdir(directory.path / f"batch-{batch:08d}"))


def test_a_batch_that_was_half_deleted_goes_at_the_next_call(directory: RolloutDirectory) -> None:
    """As the version before left it, when it was killed after the mark."""
    (directory.path / "batch-00000000" / "DELETED").write_text("")
    (directory.path / "batch-00000001" / "DELETED").write_text("")
    (directory.path / "batch-00000001" / "index.parquet").unlink()
    RolloutDirectory(directory.path).delete_before(1)
    assert files(directory, 0) == ["DELETED", "key"]
    assert "part-00000.parquet" in files(directory, 1)
    RolloutDirectory(directory.path).delete_before(2)
    assert files(directory, 1) == ["DELETED", "key"]
    assert directory.state(2) == "present"


@pytest.mark.parametrize(
    ("place", "is_deleted"),
    [("deletion-mark:before", False), ("deletion-mark:middle", True), ("deletion:before", True)],
)
def test_a_full_disk_stops_nobody(
    directory: RolloutDirectory,
    capsys: pytest.CaptureFixture[str],
    place: str,
    is_deleted: bool,
) -> None:
    arm(Failpoint.parse(f"{place}:1:enospc"))
    try:
        directory.delete_before(3)
    finally:
        arm(None)
    said = capsys.readouterr().out.splitlines()
    if place == "deletion-mark:middle":  # the mark is there, without its text
        assert said == [] and files(directory, 0) == ["DELETED", "key"]
    else:
        assert said == [
            f"[megatron_dynbatch] batch 0 in {directory.path} cannot be deleted (No space left on "
            "device); training goes on, and it is tried again after the next checkpoint (said once)"
        ]
    if is_deleted:
        with pytest.raises(RolloutDataError, match="was deleted"):
            directory.state(0)
    else:
        assert directory.state(0) == "present" and len(directory.read(0, range(5))) == 5
    assert [files(directory, batch) for batch in (1, 2)] == [["DELETED", "key"]] * 2
    directory.delete_before(3)
    assert files(directory, 0) == ["DELETED", "key"]
    assert directory.state(3) == "present"


def test_each_kind_of_failure_is_said_once(
    directory: RolloutDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    for batch in range(3):  # nothing can unlink a folder
        (directory.path / f"batch-{batch:08d}" / "part-00009.parquet").mkdir()
    for _ in range(3):
        directory.delete_before(3)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert files(directory, 0) == ["DELETED", "key", "part-00009.parquet"]


def test_a_directory_that_cannot_be_listed(
    directory: RolloutDirectory,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(path: object) -> list[str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("megatron_dynbatch.rollouts.slots.os.listdir", refuse)
    directory.delete_before(3)
    said = capsys.readouterr().out
    assert "batches before 3" in said and "(Input/output error); training goes on" in said


def test_a_link_in_the_place_of_a_batch_is_left_alone(
    directory: RolloutDirectory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "batch"
    (directory.path / "batch-00000000").rename(outside)
    (directory.path / "batch-00000000").symlink_to(outside)
    directory.delete_before(2)
    assert "index.parquet" in os.listdir(outside) and "DELETED" not in os.listdir(outside)
    assert files(directory, 1) == ["DELETED", "key"]

"""Numbers that are missing, and folders that are no batches, are named to writer and reader."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory
from tests.rollouts.helpers import golden_samples


def directory(path: Path, num_batches: int, *, end: bool) -> RolloutDirectory:
    written = RolloutDirectory(path, open_timeout=0.0)
    for _ in range(num_batches):
        written.write(golden_samples())
    if end:
        written.finish()
    return written


@pytest.mark.parametrize(
    ("removed", "end", "sentence"),
    [
        ([2], True, "batch 2 is missing although batches 0, 1, 3 and END are there"),
        ([2], False, "batch 2 is missing although batches 0, 1, 3 are there"),
        ([0], True, "batch 0 is missing although batches 1 to 3 and END are there"),
        ([3], True, "batch 3 is missing although batches 0 to 2 and END are there"),
        ([0, 1, 2], False, "batch 0 is missing although batch 3 is there"),
    ],
)
def test_a_missing_batch_is_an_error_that_says_what_is_there(
    tmp_path: Path, removed: list[int], end: bool, sentence: str
) -> None:
    directory(tmp_path, 4, end=end)
    for number in removed:
        (tmp_path / f"batch-{number:08d}").rename(tmp_path / f".tmp-gone-{number}")
    with pytest.raises(RolloutDataError) as raised:
        RolloutDirectory(tmp_path, open_timeout=0.0).state(removed[0])
    assert str(raised.value).startswith(f"{tmp_path}: {sentence}")
    (tmp_path / f".tmp-gone-{removed[0]}").rename(tmp_path / f"batch-{removed[0]:08d}")
    assert RolloutDirectory(tmp_path, open_timeout=0.0).state(removed[0]) == "present"


def test_a_batch_that_shows_after_a_later_one_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory(tmp_path, 3, end=True)
    (tmp_path / "batch-00000001").rename(tmp_path / "late")
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    reader = RolloutDirectory(tmp_path, open_timeout=10.0)
    for _ in range(9):
        assert reader.state(1) == "absent"
        now[0] += 1.1
    (tmp_path / "late").rename(tmp_path / "batch-00000001")
    assert reader.state(1) == "present"
    (tmp_path / "batch-00000001").rename(tmp_path / "late")
    reader = RolloutDirectory(tmp_path, open_timeout=10.0)
    assert reader.state(1) == "absent"
    now[0] += 10.1
    with pytest.raises(RolloutDataError, match="batch 1 is missing although batches 0, 2 and END"):
        reader.state(1)


def made_by_hand(path: Path) -> None:
    path.mkdir()


def with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("hi")


@pytest.mark.parametrize("make", [made_by_hand, with_a_file])
@pytest.mark.parametrize("number", [1, 3])
def test_a_folder_that_is_no_batch_skips_no_number(
    tmp_path: Path, make: Callable[[Path], None], number: int
) -> None:
    written = directory(tmp_path, 1, end=False)
    stray = tmp_path / f"batch-{number:08d}"
    make(stray)
    sentence = f"{stray} is there but is no batch"
    if number > 1:
        sentence = "batch 1 is missing although batch 0"  # by the numbers after it
    for action in (lambda: written.write(golden_samples()), written.finish):
        with pytest.raises(RolloutDataError) as raised:
            action()
        assert "is no batch" in str(raised.value) or sentence in str(raised.value)
    with pytest.raises(RolloutDataError, match="is there but is no batch") as raised:
        RolloutDirectory(tmp_path, open_timeout=0.0).state(1)
    assert str(stray) in str(raised.value) and "remove it" in str(raised.value)
    for file in stray.iterdir():
        file.unlink()
    stray.rmdir()
    assert written.write(golden_samples()) == 1
    assert written.finish() == 2
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".tmp-")]


def test_a_folder_that_shows_before_its_files_is_waited_for(tmp_path: Path) -> None:
    directory(tmp_path, 2, end=False)
    index = tmp_path / "batch-00000001" / "index.parquet"
    index.rename(tmp_path / "late")
    writer = RolloutDirectory(tmp_path, open_timeout=30.0)
    assert writer.state(1) == "absent"
    timer = threading.Timer(0.2, lambda: (tmp_path / "late").rename(index))
    timer.start()
    try:
        assert writer.write(golden_samples()) == 2
    finally:
        timer.join()


def test_batches_that_somebody_removed_after_training_do_not_stop_the_writer(
    tmp_path: Path,
) -> None:
    directory(tmp_path, 3, end=False)
    for number in (0, 1):
        (tmp_path / f"batch-{number:08d}").rename(tmp_path / f".tmp-{number}")
    assert RolloutDirectory(tmp_path, open_timeout=0.0).write(golden_samples()) == 3

"""The id of a rollout directory: made once, whoever comes first, and kept by copies."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.rollouts import (
    RolloutDataError,
    RolloutDirectory,
    RolloutQueue,
    Sample,
    files,
    marker,
)

SAMPLES = [Sample([1, 2, 3], 1)]


def refuse(*args: Any) -> None:
    raise OSError(errno.EPERM, "no hard links here")


@pytest.mark.parametrize("has_links", [True, False])
def test_writers_that_make_it_at_the_same_moment_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    for attempt in range(10):
        path, count = tmp_path / str(attempt), 8
        barrier, found = threading.Barrier(count), list[str]()
        create = marker.create_text

        def at_once(*args: Any, barrier: Any = barrier, create: Any = create) -> None:
            barrier.wait()  # all have seen that there is no marker
            create(*args)

        monkeypatch.setattr(marker, "create_text", at_once)

        def make(path: Path = path, found: list[str] = found) -> None:
            directory = RolloutDirectory(path)
            directory.write(SAMPLES)
            found.append(directory.source_id())

        threads = [threading.Thread(target=make) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monkeypatch.setattr(marker, "create_text", create)
        assert len(found) == count and set(found) == {RolloutDirectory(path).source_id()}
        assert found[0] and not list(path.glob(".tmp-*"))


def test_it_appears_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    link = os.link

    def look_and_link(source: Path, target: Path) -> None:
        assert not target.exists() and json.loads(Path(source).read_text())["id"]
        link(source, target)

    monkeypatch.setattr(os, "link", look_and_link)
    RolloutDirectory(path).publish("layout", "x")
    assert RolloutDirectory(path).source_id()


def test_copies_and_moves_keep_it_and_other_directories_have_others(tmp_path: Path) -> None:
    first, second = RolloutDirectory(tmp_path / "a"), RolloutDirectory(tmp_path / "b")
    assert first.source_id() == ""
    first.write(SAMPLES), second.write(SAMPLES)
    known = first.source_id()
    assert known and known != second.source_id()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    (tmp_path / "a").rename(tmp_path / "moved")
    assert {RolloutDirectory(tmp_path / name).source_id() for name in ("copy", "moved")} == {known}
    assert RolloutQueue("a").source_id() == "queue:a"


def test_a_directory_of_before_has_none(tmp_path: Path) -> None:
    text = '{"format": "megatron-dynbatch rollouts", "version": 3}'
    (tmp_path / "dynbatch.json").write_text(text)
    directory = RolloutDirectory(tmp_path)
    directory.write(SAMPLES)
    assert directory.source_id() == "" and (tmp_path / "dynbatch.json").read_text() == text


def test_a_marker_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "dynbatch.json"
    path.touch()
    with pytest.raises(RolloutDataError, match="is empty: who made it was interrupted; remove it"):
        RolloutDirectory(tmp_path, open_timeout=0.0).state(0)
    directory, seen = RolloutDirectory(tmp_path, open_timeout=60), list[str]()
    thread = threading.Thread(target=lambda: seen.append(directory.source_id()))
    thread.start()
    text = '{"format": "megatron-dynbatch rollouts", "version": 3, "id": "a"}'
    files.replace_text(path, text, "marker")
    thread.join()
    assert seen == ["a"]


def test_a_full_disk_leaves_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        RolloutDirectory(tmp_path).write(SAMPLES)
    assert not list(tmp_path.iterdir())

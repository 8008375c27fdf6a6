"""Nothing below a rollout directory is followed out of it, and nothing but files is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory
from megatron_dynbatch.rollouts.checked_paths import own_folder, own_text
from tests.rollouts.helpers import assert_same_samples, golden_samples

BATCH = "batch-00000000"


def written(path: Path) -> RolloutDirectory:
    """A directory with a batch, a plan, a key and a note."""
    directory = RolloutDirectory(path, open_timeout=0.0)
    directory.write(golden_samples(), "plan", key="key")
    directory.publish("note", "text")
    return directory


READS: dict[str, Callable[[RolloutDirectory], object]] = {
    f"{BATCH}/index.parquet": lambda d: d.index(0),
    f"{BATCH}/part-00000.parquet": lambda d: d.read(0, [0]),
    f"{BATCH}/manifest.json": lambda d: d.stamp(0),
    f"{BATCH}/plan.json": lambda d: d.plan_json(0),
    f"{BATCH}/key": lambda d: d.write(golden_samples(), key="key"),
    BATCH: lambda d: d.state(0),
    "notes/note": lambda d: d.published("note"),
    "notes": lambda d: d.published("note"),
    "dynbatch.json": lambda d: d.state(0),
}


@pytest.mark.parametrize("name", READS)
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "rollouts").path
    READS[name](RolloutDirectory(path))
    (path / name).rename(tmp_path / "outside")
    (path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(RolloutDataError, match=f"{name} is a symbolic link") as caught:
        READS[name](RolloutDirectory(path, open_timeout=0.0))
    assert str(path / name) in str(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [name for name in READS if name not in (BATCH, "notes")])
def test_pipes_and_folders_are_not_opened(tmp_path: Path, name: str) -> None:
    for number, put in enumerate((os.mkfifo, os.mkdir)):
        path = written(tmp_path / str(number)).path
        (path / name).unlink()
        put(path / name)
        with pytest.raises(RolloutDataError, match=f"{name} is not a file"):
            READS[name](RolloutDirectory(path, open_timeout=0.0))


def test_nothing_is_deleted_or_written_behind_a_link(tmp_path: Path) -> None:
    directory = written(tmp_path / "rollouts")
    for name in (BATCH, "notes"):
        (directory.path / name).rename(tmp_path / name)
        (directory.path / name).symlink_to(tmp_path / name)
    before = sorted(tmp_path.glob("*/*"))
    directory.delete_before(1)  # passes a link over
    with pytest.raises(RolloutDataError, match="symbolic link"):
        directory.publish("other", "text")
    assert sorted(tmp_path.glob("*/*")) == before
    with pytest.raises(RolloutDataError, match="symbolic link"):
        own_folder(directory.path, BATCH)


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    written(tmp_path / "rollouts")
    (tmp_path / "link").symlink_to(tmp_path / "rollouts")
    directory = RolloutDirectory(tmp_path / "link")
    assert_same_samples(directory.read(0, [1]), golden_samples()[1:2])
    directory.delete_before(1)
    assert not (tmp_path / "rollouts" / BATCH / "index.parquet").exists()


def test_a_text_is_read_up_to_a_limit(tmp_path: Path) -> None:
    """Of a file of a terabyte, which is a hole and takes no disk."""
    with open(tmp_path / "plan", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RolloutDataError, match="plan has more than 67108864 bytes"):
        own_text(tmp_path, "plan")
    assert own_text(tmp_path, "absent") is None

"""A writer that loses the race for a number: nothing is lost, doubled or left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, Sample


def tagged(tag: int) -> list[Sample]:
    return [Sample([tag, tag], 1, rollout_id=0)]


def faster(monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[], object]) -> None:
    """Have `act` happen between a writer's look at what is there and its first rename to it."""
    rename = os.rename

    def after_another(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        if Path(target).parent == path:
            monkeypatch.undo()
            act()
        rename(source, target)

    monkeypatch.setattr("os.rename", after_another)


@pytest.fixture
def directory(tmp_path: Path) -> RolloutDirectory:
    directory = RolloutDirectory(tmp_path)
    directory.write(tagged(1))
    return directory


def tags(directory: RolloutDirectory, count: int) -> list[int]:
    return [int(directory.read(batch, [0])[0].tokens[0]) for batch in range(count)]


def test_the_loser_takes_the_next_number(
    directory: RolloutDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set(os.listdir(directory.path))
    other = RolloutDirectory(directory.path)
    faster(monkeypatch, directory.path, lambda: [other.write(tagged(2)), other.write(tagged(3))])
    assert directory.write(tagged(4)) == 3
    assert tags(RolloutDirectory(directory.path), 4) == [1, 2, 3, 4]
    assert len(set(os.listdir(directory.path)) - names) == 3  # no slot is left


def test_the_loser_of_the_same_key_finds_the_winners_batch(
    directory: RolloutDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RolloutDirectory(directory.path)
    faster(monkeypatch, directory.path, lambda: other.write(tagged(2), key="a"))
    assert directory.write(tagged(2), key="a") == 1
    assert directory.state(2) == "absent"
    assert tags(directory, 2) == [1, 2]


def test_a_writer_that_loses_to_the_end_is_refused(
    directory: RolloutDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RolloutDirectory(directory.path)
    faster(monkeypatch, directory.path, other.finish)
    with pytest.raises(RolloutDataError, match="the run is finished after 1 batch;"):
        directory.write(tagged(2))
    assert directory.state(1) == "end"
    assert [name for name in os.listdir(directory.path) if name.startswith(".")] == []


def test_an_end_that_loses_to_a_batch_comes_after_it(
    directory: RolloutDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RolloutDirectory(directory.path)
    faster(monkeypatch, directory.path, lambda: other.write(tagged(2)))
    assert directory.finish() == 2
    assert directory.state(1) == "present" and directory.state(2) == "end"
    assert tags(directory, 2) == [1, 2]


def test_another_error_of_the_rename_is_raised(
    directory: RolloutDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.rename", no_space)
    with pytest.raises(OSError, match="No space left"):
        directory.write(tagged(2))
    monkeypatch.undo()
    assert directory.state(1) == "absent" and directory.write(tagged(2)) == 1

"""Megatron goes on with the rollouts of its checkpoint, and with no others (two ranks)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.rollouts import RolloutDirectory
from megatron_dynbatch.steps.ledger import read_ledger
from tests.compatibility.make import TRAIN, samples, train_job
from tests.pool import run_ranks

SIZES = (6, 10)  # steps of 4, 2 | 4, 4, 2

# Directory → flags with which the run goes on there; the checkpoint lies inside batch 1.
RESUMES: dict[str, list[str]] = {
    "rollouts": [],
    "copied": [],
    "again": ["--rollouts-moved"],
    "again without the flag": [],
    "other": [],
    "replaced": [],
}


def write(path: Path, first: int = 0) -> RolloutDirectory:
    """Rollouts of one sample and of two in turns."""
    directory = RolloutDirectory(path)
    for number, count in enumerate(SIZES):
        alone = samples(first + number, count)
        directory.write([sample for n, sample in enumerate(alone) for _ in range(1 + n % 2)])
    directory.finish()
    return directory


def path_of(kind: str) -> str:
    return kind.partition(" with")[0]


def resume_all(folder: str) -> dict[str, Any]:
    """Rows of each run that goes on, or the error that it ends with."""
    found: dict[str, Any] = {"whole": train_job(folder, TRAIN, True)}
    for kind, flags in RESUMES.items():
        path = ["--rollout-path", path_of(kind)]
        argv = [*TRAIN, "--load", "checkpoint", *path, *flags, "--rollout-ledger", f"{kind}.jsonl"]
        try:
            found[kind] = train_job(folder, argv, True, None)
        except DynbatchError as error:
            found[kind] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identity")
    write(folder / "rollouts")
    part = [*TRAIN, "--save", "checkpoint", "--exit-interval", "3"]
    run_ranks(2, train_job, str(folder), part, True)
    write(folder / "again")
    write(folder / "other", first=5)
    shutil.copytree(folder / "rollouts", folder / "copied")
    shutil.copytree(folder / "rollouts", folder / "replaced")
    batch = "batch-00000001"
    shutil.rmtree(folder / "replaced" / batch)
    shutil.copytree(folder / "other" / batch, folder / "replaced" / batch)
    return folder


@pytest.fixture(scope="module")
def resumed(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(2, resume_all, str(folder), timeout=280)


def test_the_same_rollouts_are_gone_on_with_wherever_they_are(
    resumed: list[dict[str, Any]],
) -> None:
    for found in resumed:
        assert [row["consumed"] for row in found["whole"]] == [4, 6, 10, 14, 16]
        for kind in ("rollouts", "copied", "again"):
            assert found[kind] == found["whole"][3:], kind


@pytest.mark.parametrize("kind", ["other", "again without the flag"])
def test_another_directory_is_refused(
    folder: Path, resumed: list[dict[str, Any]], kind: str
) -> None:
    path = path_of(kind)
    old, new = (RolloutDirectory(folder / name).source_id() for name in ("rollouts", path))
    message = (
        f"ResumeError: the checkpoint was trained on RolloutDirectory('rollouts') (id {old}), but "
        f"RolloutDirectory('{path}') has the id {new}: these are other rollouts; "
    )
    first, second = (found[kind] for found in resumed)
    assert first.startswith(message) and "--rollouts-moved" in first
    assert second == f"RankFailure: rank 0: {first}"


def test_a_batch_that_was_replaced_is_refused(folder: Path, resumed: list[dict[str, Any]]) -> None:
    old, new = (RolloutDirectory(folder / n).content_stamp(1) for n in ("rollouts", "replaced"))
    first, second = (found["replaced"] for found in resumed)
    assert first.startswith("ResumeError: rollout batch 1 is not the one that the checkpoint was")
    assert f"one with the stamp {new}, then it was {old}" in first and old != new
    assert second == f"RankFailure: rank 0: {first}"


def test_the_ledger_of_a_moved_run_names_the_directory_and_the_same_batch(
    folder: Path, resumed: list[dict[str, Any]]
) -> None:
    for kind in ("rollouts", "again"):
        source = RolloutDirectory(folder / kind)
        entries = [e for e in read_ledger(folder / f"{kind}.jsonl") if e.batch_id == 1]
        assert len(entries) == 3
        assert {e.source_id for e in entries} == {source.source_id()}
        assert {e.stamp for e in entries} == {source.content_stamp(1)}
    for refused in ("other", "replaced"):
        assert read_ledger(folder / f"{refused}.jsonl") == []

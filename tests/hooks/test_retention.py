"""Batches go when a completed checkpoint lies beyond them; a resume knows it (real Megatron)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory, RolloutQueue, Sample
from megatron_dynbatch.steps import Cursor, StepFeed
from tests.cpu.training import train, train_ranks
from tests.pool import run_ranks
from tests.reliability.catalogue import shown


def write_run(path: Path) -> None:
    directory = RolloutDirectory(path)
    for _ in range(4):
        directory.write([Sample(range(1, 9), 4, rollout_id=n) for n in (0, 0, 1, 2, 3)])
    directory.finish()


def flags(path: Path, checkpoint: Path, *more: str) -> list[str]:
    return [
        "--dynamic-global-batch", "--rollout-path", str(path), "--rollouts-per-step", "4",
        "--max-tokens-per-gpu", "64", "--train-iters", "4", "--lr-decay-iters", "4",
        "--save", str(checkpoint), "--ckpt-format", "torch", *more,
    ]  # fmt: skip


def deleted(path: Path) -> list[int]:
    return [n for n in range(4) if (path / f"batch-{n:08d}" / "DELETED").exists()]


@pytest.mark.parametrize(("keep", "gone"), [("0", [0, 1]), ("1", [0])])
def test_batches_before_a_completed_checkpoint_go(
    tmp_path: Path, keep: str, gone: list[int]
) -> None:
    path, checkpoint = tmp_path / "rollouts", tmp_path / "checkpoint"
    write_run(path)
    # The checkpoint after step 2 is completed when step 3 begins; the last one ends the training.
    argv = flags(path, checkpoint, "--save-interval", "2", "--keep-batches", keep)
    train_ranks(1, argv, install_hooks=True)
    assert deleted(path) == gone


def test_without_a_checkpoint_or_the_option_nothing_goes(tmp_path: Path) -> None:
    path = tmp_path / "rollouts"
    write_run(path)
    train_ranks(1, flags(path, tmp_path / "a", "--save-interval", "1"), install_hooks=True)
    train_ranks(
        1,
        flags(path, tmp_path / "b", "--save-interval", "9", "--keep-batches", "0"),
        install_hooks=True,
    )
    assert deleted(path) == []


def test_a_tracker_that_was_there_before_says_nothing_of_this_run(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "rollouts", tmp_path / "checkpoint"
    write_run(path)
    checkpoint.mkdir()
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("2")
    argv = flags(path, checkpoint, "--save-interval", "9", "--keep-batches", "0")
    train_ranks(1, argv, install_hooks=True)
    assert deleted(path) == []


def test_a_run_whose_first_batches_are_gone_is_resumed(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "rollouts", tmp_path / "checkpoint"
    write_run(path)
    argv = flags(path, checkpoint, "--save-interval", "2", "--keep-batches", "0")
    (whole,) = train_ranks(1, argv, install_hooks=True)
    assert deleted(path) == [0, 1]
    more = ["--load", str(checkpoint), "--ckpt-step", "2"]
    (rest,) = train_ranks(1, [*argv, *more], install_hooks=True, weights_seed=None)
    assert [row["iteration"] for row in rest.rows] == [3, 4]
    assert rest.rows == whole.rows[2:]


def refused(argv: list[str]) -> str:
    """What this rank is told, before any step."""
    try:
        found = train(argv, install_hooks=True, weights_seed=None)
    except ResumeError as error:
        return str(error)
    raise AssertionError(f"trained {found.rows}")


@pytest.mark.parametrize(
    "ckpt_format", ["torch", pytest.param("torch_dist", marks=pytest.mark.slow)]
)
def test_a_resume_that_needs_deleted_batches_names_them_and_what_would_do(
    tmp_path: Path, ckpt_format: str
) -> None:
    path, checkpoint = tmp_path / "rollouts", tmp_path / "checkpoint"
    write_run(path)
    argv = flags(path, checkpoint, "--save-interval", "1", "--keep-batches", "0")
    argv += ["--ckpt-format", ckpt_format]
    train_ranks(1, argv, install_hooks=True)
    assert deleted(path) == [0, 1, 2]
    argv += ["--load", str(checkpoint), "--ckpt-step", "1"]
    sentence = (
        f"training would go on at rollout batch 1 of RolloutDirectory({str(path)!r}), but batches "
        "1, 2 were deleted (--keep-batches); the oldest checkpoint that would do: iteration 3 in "
        f"{checkpoint} (--load {checkpoint} --ckpt-step 3)"
    )
    assert run_ranks(2, refused, argv) == [sentence, sentence]


def test_a_run_from_the_beginning_needs_all_batches(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "rollouts", tmp_path / "checkpoint"
    write_run(path)
    RolloutDirectory(path).delete_before(1)
    (told,) = run_ranks(1, refused, flags(path, checkpoint, "--save-interval", "2"))
    assert "training would go on at rollout batch 0" in told
    shown("training would go on at rollout batch", told)
    assert "batch 0 was deleted" in told
    assert f"the oldest checkpoint that would do: none in {checkpoint}" in told


def count_looks(model: list[Any], optimizer: Any) -> None:
    """From here on each look at the tracker file is noted."""
    from megatron_dynbatch.hooks import session

    look = session.completed_iteration

    def noted(folder: Path) -> int:
        LOOKS.append(folder)
        return look(folder)

    session.completed_iteration = noted


LOOKS: list[Path] = []


def looks(model: list[Any], optimizer: Any) -> int:
    """How many there were."""
    return len(LOOKS)


def test_rank_0_alone_looks_at_the_tracker_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts"
    write_run(path)
    argv = flags(path, tmp_path / "checkpoint", "--save-interval", "9", "--keep-batches", "0")
    first, second = train_ranks(2, argv, install_hooks=True, before=count_looks, collect=looks)
    assert (first.collected, second.collected) == (4, 0)


def test_a_deletion_that_fails_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    class FullDisk(RolloutQueue):
        def delete_before(self, batch_id: int) -> None:
            raise OSError(28, "No space left on device")

    options = PlanOptions(max_tokens_per_gpu=16)
    feed = StepFeed(FullDisk("queue"), ParallelLayout(), options, keep_batches=1)
    feed.checkpoint_completed(Cursor(batch_id=3))
    assert "rollout batches before 2 could not be deleted ([Errno 28]" in capsys.readouterr().out

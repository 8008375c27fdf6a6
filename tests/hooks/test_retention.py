"""Batches go when a completed checkpoint lies beyond them, and only then (real Megatron)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from tests.cpu.training import train_ranks


def write_run(path: Path) -> None:
    directory = RolloutDirectory(path)
    for _ in range(4):
        directory.write([Sample(range(1, 9), 4, rollout_id=n) for n in range(4)])
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

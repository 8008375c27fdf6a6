"""What would be waited for in vain, or lost, ends training before a step (real Megatron)."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from tests.cpu.training import train_ranks
from tests.hooks.test_retention import write_run
from tests.pool import RankError


def flags(path: Path, *more: str) -> list[str]:
    return [
        "--dynamic-global-batch", "--rollout-path", str(path), "--rollouts-per-step", "4",
        "--max-tokens-per-gpu", "64", "--train-iters", "4", "--lr-decay-iters", "4", *more,
    ]  # fmt: skip


def test_a_mistyped_rollout_path(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rolouts.* is not there, looked for during 1 s") as raised:
        train_ranks(1, flags(tmp_path / "rolouts", "--batch-timeout", "1"), install_hooks=True)
    assert "is not there; waiting 1 s for the rollout side to make it" in str(raised.value)
    assert list(tmp_path.glob("rolouts*")) == []


def test_a_ledger_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    write_run(tmp_path / "rollouts")
    ledger = tmp_path / "runs" / "ledger.jsonl"
    argv = flags(tmp_path / "rollouts", "--rollout-ledger", str(ledger))
    with pytest.raises(RankError, match="LedgerError: .*the rollout ledger cannot be written"):
        train_ranks(2, argv, install_hooks=True)


def test_masks_that_are_all_zero(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "rollouts")
    for _ in range(2):
        directory.write([Sample(range(1, 9), loss_mask=[0] * 4, rollout_id=n) for n in range(4)])
    directory.finish()
    argv = flags(tmp_path / "rollouts", "--max-empty-batches", "2")
    with pytest.raises(RankError, match="rollout batches 0, 1 train nothing .4 rollouts") as raised:
        train_ranks(1, argv, install_hooks=True)
    assert "rollout batch 0 trains nothing: 4 rollouts without a trained token" in str(raised.value)

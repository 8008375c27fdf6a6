"""Tools that read a rollout directory begin at the first batch that retention left."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_dynbatch.cli.plan_input import read_index
from megatron_dynbatch.cli.verify_rollouts import read_batches
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, Sample


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Batches of one, two, three and four samples; the first two were deleted."""
    rollouts = RolloutDirectory(tmp_path / "rollouts")
    for size in (1, 2, 3, 4):
        rollouts.write([Sample([5, 6, 7], 2) for _ in range(size)])
    rollouts.finish()
    rollouts.delete_before(2)
    return rollouts.path


def test_verify_reads_the_batches_that_are_left(directory: Path) -> None:
    assert [len(batch) for batch in read_batches(directory, 9)] == [3, 4]
    assert [len(batch) for batch in read_batches(directory, 1)] == [3]


@pytest.mark.parametrize(("batch", "size"), [(None, 3), (3, 4)])
def test_plan_takes_the_first_that_is_left(directory: Path, batch: int | None, size: int) -> None:
    assert len(read_index(argparse.Namespace(rollouts=directory, batch=batch))) == size


def test_a_deleted_batch_that_is_asked_for_is_an_error(directory: Path) -> None:
    with pytest.raises(RolloutDataError, match="batch-00000001 was deleted"):
        read_index(argparse.Namespace(rollouts=directory, batch=1))

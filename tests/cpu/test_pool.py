"""A rank that raises, dies or hangs is a failure that says so; the next job is not touched."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import RankError, run_ranks


def total(scale: float) -> float:
    value = torch.tensor(float(dist.get_rank()) + 1)
    dist.all_reduce(value)
    return scale * value.item()


def one_rank_fails(how: str) -> None:
    if dist.get_rank() == 1:
        print("about to fail")
        if how == "raise":
            raise ValueError("no such thing")
        if how == "exit":
            raise SystemExit(3)
        if how == "die":
            os._exit(9)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order_from_one_world(size: int) -> None:
    assert run_ranks(size, total, 2.0) == [size * (size + 1.0)] * size


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "no such thing"),
        ("exit", "SystemExit: 3"),
        ("die", "rank 1: died with exit code 9"),
        pytest.param("hang", "no result within 15 s", marks=pytest.mark.slow),
    ],
)
def test_failing_rank_ends_the_job_and_not_the_next(how: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as error:
        # A loaded machine takes seconds to start two ranks.
        run_ranks(2, one_rank_fails, how, timeout=15 if how == "hang" else 60)
    assert "rank 1" in str(error.value)
    if how == "hang":
        assert "one_rank_fails" in str(error.value)  # where it hangs
    assert run_ranks(2, total, 1.0) == [3.0, 3.0]

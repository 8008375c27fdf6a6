"""Metrics over real ranks: one collective, the same bits everywhere, and no hang on a lost name."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dynbatch.report import Metric, reduce_over_ranks
from megatron_dynbatch.report.over_ranks import BUFFER
from tests.pool import run_ranks

VALUES = [[1.0, 2.0, 6.0], [], [3.1]]


def of_rank(rank: int) -> dict[str, Metric]:
    x = torch.tensor(VALUES[rank], dtype=torch.float64)
    metrics = {
        "mean": Metric.mean(x.sum(), float(len(x))),
        "tokens": Metric.count(len(x)),
        "min": Metric.least(x, torch.ones_like(x)),
        "max": Metric.largest(x, torch.ones_like(x)),
        "std": Metric.std_of(VALUES[rank]),
        "third": Metric.total(x.sum() / 3),
    }
    # Names need not come in the same order.
    return dict(reversed(metrics.items())) if rank == 1 else metrics


def job() -> tuple[dict[str, float], int, dict[str, float]]:
    calls = 0
    gather = dist.all_gather

    def counting(*args: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        return gather(*args, **named)

    dist.all_gather = counting
    rank = dist.get_rank()
    few = reduce_over_ranks(of_rank(rank))
    after_few = calls
    many = reduce_over_ranks({f"m{i}": Metric.mean(float(i), 1.0) for i in range(BUFFER)})
    assert calls == after_few + 2
    return few, after_few, many


def test_every_kind_over_three_ranks_in_one_collective() -> None:
    answers = run_ranks(3, job)
    whole = np.array([x for part in VALUES for x in part])
    expected = {"mean": whole.mean(), "tokens": whole.size, "min": whole.min(),
                "max": whole.max(), "std": whole.std(), "third": whole.sum() / 3}  # fmt: skip
    for few, calls, many in answers:
        assert few == pytest.approx(expected, rel=1e-14)
        assert calls == 1
        assert few == answers[0][0]  # to the last bit
        assert many == {f"m{i}": float(i) for i in range(BUFFER)}


def lost_name() -> str:
    metrics = {"loss": Metric.total(1.0)}
    if dist.get_rank() == 1:
        metrics["entropy"] = Metric.total(1.0)
    try:
        reduce_over_ranks(metrics)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_name_on_one_rank_only_is_an_error_on_every_rank() -> None:
    expected = "metric 'entropy' is reported by rank 1 but not by rank 0, 2; "
    assert all(answer.startswith(expected) for answer in run_ranks(3, lost_name, timeout=60))


def test_alone() -> None:
    assert reduce_over_ranks({"x": Metric.mean(3.0, 2.0)}) == {"x": 1.5}
    assert reduce_over_ranks({}) == {}

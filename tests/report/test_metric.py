"""Typed metrics: what their parts amount to, however they are cut."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.report import Metric, merge

NAN = float("nan")


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), min_size=1, max_size=5))
def test_values_do_not_depend_on_the_cut(parts: list[list[float]]) -> None:
    def metrics(values: list[float]) -> dict[str, Metric]:
        x = torch.tensor(values, dtype=torch.float64)
        return {
            "mean": Metric.mean_of(values),
            "sum": Metric.total(x.sum()),
            "count": Metric.count(len(values)),
            "min": Metric.least(x, torch.ones_like(x)),
            "max": Metric.largest(x, torch.ones_like(x)),
            "std": Metric.std_of(values),
        }

    found = {n: m.value() for n, m in merge([metrics(p) for p in parts], "part").items()}
    whole = np.array([x for part in parts for x in part])
    if not whole.size:
        assert all(math.isnan(found[n]) for n in ("mean", "min", "max", "std"))
        assert found["sum"] == found["count"] == 0
        return
    expected = {"mean": whole.mean(), "sum": whole.sum(), "count": whole.size,
                "min": whole.min(), "max": whole.max(), "std": whole.std()}  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_mean_is_divided_once_at_the_end() -> None:
    # Four over one token and nothing over three: 1.0, not the mean of means 2.0.
    parts = [{"x": Metric.mean(4.0, 1.0)}, {"x": Metric.mean(0.0, 3.0)}]
    assert merge(parts, "micro-batch")["x"].value() == 1.0


def test_masked_positions_are_no_extremes() -> None:
    x, mask = torch.tensor([[5.0, NAN, -7.0, 2.0]]), torch.tensor([[1, 0, 0, 1]])
    assert Metric.least(x, mask).value() == 2.0
    assert Metric.largest(x, mask).value() == 5.0
    assert math.isnan(Metric.least(x, torch.zeros(4)).value())
    assert math.isnan(Metric.largest(torch.zeros(0), torch.zeros(0)).value())
    assert Metric.largest(torch.tensor([math.inf]), torch.ones(1)).value() == math.inf


def test_a_std_of_large_numbers_keeps_its_digits() -> None:
    parts = [{"x": Metric.std_of([1e9 + 1, 1e9 + 2])}, {"x": Metric.std_of([1e9 + 3])}]
    assert merge(parts, "part")["x"].value() == pytest.approx(math.sqrt(2 / 3), rel=1e-9)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [{"a": Metric.count(1)}, {"a": Metric.count(1), "b": Metric.count(1)}],
            "'b' is reported by micro-batch 1 but not by micro-batch 0",
        ),
        (
            [{"a": Metric.count(1)}, {"a": Metric.total(1.0)}],
            "'a' is reported as count by micro-batch 0, sum by micro-batch 1; give it one kind",
        ),
    ],
)
def test_contributions_that_disagree_are_named(parts: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge(parts, "micro-batch")


def test_bad_kinds_and_parts() -> None:
    with pytest.raises(ValueError, match="kind is one of mean, sum, .* got 'median'"):
        Metric("median", (1.0,))
    with pytest.raises(ValueError, match="kind std has 3 parts, got 1"):
        Metric("std", (1.0,))
    assert merge([], "part") == {}

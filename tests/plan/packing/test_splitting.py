"""Micro-batches halved until there are enough: nothing is lost, the count is reached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.plan import PlanError
from megatron_dynbatch.plan.packing.splitting import expand_bins_by_splitting


def test_splitting_halves_the_costliest() -> None:
    assert expand_bins_by_splitting([[0, 1, 2], [3]], 3, [5, 3, 2, 9]) == [[0], [3], [1, 2]]


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=6))
def test_splitting_keeps_items_and_reaches_the_count(costs: list[list[int]]) -> None:
    flat = [cost for members in costs for cost in members]
    bins: list[list[int]] = []
    for members in costs:
        start = sum(len(b) for b in bins)
        bins.append(list(range(start, start + len(members))))
    for wanted in range(len(bins), len(flat) + 3):
        result = expand_bins_by_splitting(bins, wanted, flat)
        assert len(result) == min(wanted, len(flat))
        assert all(result)
        assert sorted(item for members in result for item in members) == list(range(len(flat)))
    with pytest.raises(PlanError, match="cannot make 0 bins"):
        expand_bins_by_splitting(bins, 0, flat)

"""First-fit against hand-made answers and its definition as a loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.integrations.first_fit import first_fit_pack
from megatron_dynbatch.plan import PlanError


def test_first_fit_in_arrival_order() -> None:
    assert first_fit_pack([4, 4, 4, 4, 6, 6, 6, 6], 10) == [[0, 1], [2, 3], [4], [5], [6], [7]]
    assert first_fit_pack([120, 10], 100) == [[0], [1]]
    assert first_fit_pack([], 5) == []
    with pytest.raises(PlanError, match="item 1 has length 0"):
        first_fit_pack([3, 0], 5)


@given(st.lists(st.integers(1, 12), max_size=40), st.integers(1, 10))
def test_first_fit_is_first_fit(lengths: list[int], capacity: int) -> None:
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        for members in bins:
            if sum(lengths[i] for i in members) + length <= capacity:
                members.append(item)
                break
        else:
            bins.append([item])
    assert first_fit_pack(lengths, capacity) == bins

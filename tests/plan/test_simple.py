"""The named packing pieces, against hand-made and brute-force answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.plan import PlanError, compute_dynamic_global_batch_size, first_fit_pack


@pytest.mark.parametrize(
    ("num_samples", "dp", "expected"), [(10, 4, 8), (3, 4, 4), (0, 4, 4), (12, 4, 12), (9, 1, 9)]
)
def test_dynamic_global_batch_size(num_samples: int, dp: int, expected: int) -> None:
    assert compute_dynamic_global_batch_size(num_samples, dp) == expected


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

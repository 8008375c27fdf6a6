"""The bound by fillings, where the answer is plain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing_bound import fractional_bound
from megatron_dynbatch.plan.packing.bounds import martello_toth_bound
from tests.plan.test_exact_solver import solve


@pytest.mark.parametrize(
    ("lengths", "capacity", "bins"),
    [
        ([4] * 12, 10, 6),  # two fit, although 48 tokens would go into five
        ([6] * 7, 10, 7),
        ([5] * 6, 10, 3),
        ([6, 4] * 5, 10, 5),
    ],
)
def test_known_packings(lengths: list[int], capacity: int, bins: int) -> None:
    assert fractional_bound(np.array(lengths), capacity, 1) == bins


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=10))
def test_between_the_quick_bound_and_the_optimum(lengths: list[int]) -> None:
    sizes = np.array(lengths)
    bound = fractional_bound(sizes, 20, 1)
    assert bound >= -(-int(sizes.sum()) // 20)
    assert fractional_bound(sizes, 20, 3) <= bound
    # The fewest bins for which the exact solver finds a packing.
    fewest = next(n for n in range(1, 11) if solve([1] * len(lengths), lengths, 20, n) is not None)
    assert max(bound, martello_toth_bound(sizes, 20)) <= fewest

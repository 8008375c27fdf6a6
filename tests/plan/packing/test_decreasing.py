"""Packing under a token cap and a cap on rows of logits, against first-fit written as loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.plan.packing.decreasing import first_fit_two_caps
from megatron_dynbatch.plan.packing.problem import Items

TOKENS, ROWS = 20, 12


def items_of(sizes: list[int], rows: list[int]) -> Items:
    """Items of these sizes under the two caps."""
    array = np.array(sizes, dtype=np.int64)
    return Items(
        order=np.arange(len(sizes)),
        sizes=array,
        costs=array,
        logit_rows=np.array(rows, dtype=np.int64),
        capacity=TOKENS,
        logit_capacity=ROWS,
    )


def first_fit(sizes: list[int], rows: list[int]) -> list[list[int]]:
    """Scarcest item first into the first micro-batch with room for both of its demands."""
    demand = [max(s / TOKENS, r / ROWS) for s, r in zip(sizes, rows, strict=True)]
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-demand[i], i)):
        for members in bins:
            tokens = sum(sizes[i] for i in [*members, item])
            logits = sum(rows[i] for i in [*members, item])
            if tokens <= TOKENS and logits <= ROWS:
                members.append(item)
                break
        else:
            bins.append([item])
    return bins


@pytest.mark.parametrize(
    ("sizes", "rows", "count"),
    [
        ([10, 10], [6, 6], 1),  # both caps met exactly
        ([10, 11], [6, 6], 2),
        ([10, 10], [6, 7], 2),
        ([10, 10, 10, 10], [1, 11, 11, 1], 2),
        ([25, 1], [1, 1], 2),  # over a cap: alone
    ],
)
def test_an_item_joins_where_both_caps_have_room(
    sizes: list[int], rows: list[int], count: int
) -> None:
    assert len(first_fit_two_caps(items_of(sizes, rows))) == count


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=25))
def test_it_is_first_fit_by_the_scarcer_demand(pairs: list[tuple[int, int]]) -> None:
    sizes, rows = map(list, zip(*pairs, strict=True))
    assert first_fit_two_caps(items_of(sizes, rows)) == first_fit(sizes, rows)

"""Decreasing-size packings: simple, and at hand where the others do not apply."""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.packing.problem import Items


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing: each item, longest first, into the fullest bin it fits.

    Args:
        lengths: Laid-out tokens of each sample [S]; one longer than `capacity` is alone.
        capacity: Tokens that a bin holds.

    Returns:
        Sample numbers of each bin, in the order in which bins were opened.
    """
    bins: list[list[int]] = []
    # Room and number of each bin in one integer, room · (S + 1) + bin, sorted.
    free: list[int] = []
    base = len(lengths) + 1
    order = np.argsort(-lengths, kind="stable")
    for item, size in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect.bisect_left(free, size * base)
        if place < len(free):
            room, number = divmod(free.pop(place), base)
            bins[number].append(item)
        else:
            room, number = capacity, len(bins)
            bins.append([item])
        if size < room:
            bisect.insort(free, (room - size) * base + number)
    return bins


def first_fit_two_caps(items: Items) -> list[list[int]]:
    """First-fit under the token cap and the cap on logit rows, items scarcest first.

    Returns:
        Item numbers of each micro-batch; an item over a cap is alone.
    """
    assert items.logit_rows is not None
    demand = np.stack([items.sizes / items.capacity, items.logit_rows / items.logit_capacity]).max(
        axis=0
    )
    tokens = np.zeros(items.sizes.size, dtype=np.int64)
    rows = np.zeros(items.sizes.size, dtype=np.int64)
    bins: list[list[int]] = []
    for item in np.argsort(-demand, kind="stable").tolist():
        size, num_rows = int(items.sizes[item]), int(items.logit_rows[item])
        opened = len(bins)
        fits = tokens[:opened] + size <= items.capacity
        fits &= rows[:opened] + num_rows <= items.logit_capacity
        number = int(fits.argmax()) if fits.any() else opened
        if number == opened:
            bins.append([])
        bins[number].append(item)
        tokens[number] += size
        rows[number] += num_rows
    return bins

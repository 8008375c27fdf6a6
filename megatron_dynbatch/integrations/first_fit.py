"""`first_fit_pack`: the packing that trainers on rollouts know; also a baseline of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dynbatch.errors import PlanError


def first_fit_pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit bin packing in arrival order, in n·log n.

    Args:
        lengths: Tokens of each item, all > 0.
        capacity: Tokens that a bin holds. A longer item gets a bin of its own.

    Returns:
        Item numbers of each bin.
    """
    if capacity < 1:
        raise PlanError(f"capacity must be >= 1, got {capacity}")
    # A tournament tree over the free space of bins finds the first bin with enough of it.
    leaves = 1
    while leaves < max(1, len(lengths)):
        leaves *= 2
    free = [capacity] * (2 * leaves)
    bins: list[list[int]] = []
    for item, length in enumerate(lengths):
        if length < 1:
            raise PlanError(f"item {item} has length {length}, it must be > 0")
        node = 1
        if length > capacity:
            node = leaves + len(bins)
        while node < leaves:
            node = 2 * node if free[2 * node] >= length else 2 * node + 1
        number = node - leaves
        if number == len(bins):
            bins.append([])
        bins[number].append(item)
        free[node] = max(0, free[node] - length)
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bins

"""Named packing pieces that trainers on rollouts know: the simple path, kept as baselines too."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_dynbatch.plan.errors import PlanError


def compute_dynamic_global_batch_size(num_samples: int, dp_size: int) -> int:
    """⌊num_samples / dp_size⌋ · dp_size, at least dp_size.

    The older rule of one step per batch, in which every rank gets equally many samples. Plans
    of this package need no such trimming.
    """
    if num_samples < 0 or dp_size < 1:
        raise PlanError(
            f"num_samples must be >= 0 and dp_size >= 1, got {num_samples} and {dp_size}"
        )
    return max(num_samples // dp_size, 1) * dp_size


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


def expand_bins_by_splitting(
    bins: Sequence[Sequence[int]], num_bins: int, costs: Sequence[int]
) -> list[list[int]]:
    """Split the costliest bins until there are `num_bins`, or until every bin has one item.

    Args:
        bins: Item numbers of each bin.
        num_bins: The wanted number of bins; fewer than there are is an error.
        costs: Cost of each item; a bin is cut into two halves of about equal cost.

    Returns:
        The bins; those that were not split keep their place, new ones follow.
    """
    if num_bins < len(bins):
        raise PlanError(f"cannot make {num_bins} bins by splitting {len(bins)}")
    result = [list(items) for items in bins]
    if num_bins == len(bins):
        return result
    heap = [
        (-sum([costs[item] for item in items]), number)
        for number, items in enumerate(result)
        if len(items) > 1
    ]
    heapq.heapify(heap)
    while len(result) < num_bins and heap:
        _, number = heapq.heappop(heap)
        halves = _halve(result[number], costs)
        result[number] = halves[0]
        result.append(halves[1])
        for half, place in zip(halves, (number, len(result) - 1), strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-sum(costs[item] for item in half), place))
    return result


def _halve(items: Sequence[int], costs: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two non-empty parts of about equal cost: costliest first, each to the lighter part."""
    halves: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for item in sorted(items, key=lambda item: (-costs[item], item)):
        lighter = 0 if loads[0] <= loads[1] else 1
        halves[lighter].append(item)
        loads[lighter] += costs[item]
    return sorted(halves[0]), sorted(halves[1])

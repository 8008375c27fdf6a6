"""More micro-batches out of fewer: the costliest are halved."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_dynbatch.errors import PlanError


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

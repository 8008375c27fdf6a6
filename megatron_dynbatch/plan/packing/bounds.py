"""Lower bounds: what no packing and no placement can beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def martello_toth_bound(lengths: NDArray[np.int64], capacity: int) -> int:
    """L2 of Martello and Toth (1990): no packing needs fewer bins.

    For a threshold k, items longer than capacity − k share no bin with one of length >= k, and
    items of (capacity/2, capacity − k] are alone among themselves; what is left of length >= k
    fills the room beside the latter at best.

    Args:
        lengths: Laid-out tokens of each sample [S]; one longer than `capacity` counts as a bin.
        capacity: Tokens that a bin holds.
    """
    oversize = int(np.count_nonzero(lengths > capacity))
    sizes = np.sort(lengths[lengths <= capacity])
    if not sizes.size:
        return oversize
    sums = np.concatenate([[0], np.cumsum(sizes)])
    half = int(np.searchsorted(sizes, capacity // 2, side="right"))
    thresholds = np.unique(np.concatenate([[0], sizes[:half]]))
    first_small = np.searchsorted(sizes, thresholds, side="left")
    first_huge = np.searchsorted(sizes, capacity - thresholds, side="right")
    num_huge = sizes.size - first_huge
    num_large = first_huge - half
    room = num_large * capacity - (sums[first_huge] - sums[half])
    small = sums[half] - sums[np.minimum(first_small, half)]
    extra = np.maximum(0, -(-(small - room) // capacity))
    return oversize + int((num_huge + num_large + extra).max())


def makespan_bound(costs: NDArray[np.int64], dp: int, least: int = 1) -> int:
    """No placement has a less loaded busiest rank: max(⌈Σ/dp⌉, p_1, p_dp + p_(dp+1)).

    Where each rank holds at least `least` samples, the one with p_1 holds the least − 1 cheapest
    ones besides, if no others.

    Args:
        costs: Integer cost of each sample [S].
        dp: Number of ranks; p is the list of costs, largest first.
        least: Samples of a rank at least: M where no micro-batch is empty.
    """
    if not costs.size:
        return 0
    cheapest = np.partition(costs, least - 2)[: least - 1] if least > 1 else costs[:0]
    bound = max(-(-int(costs.sum()) // dp), int(costs.max()) + int(cheapest.sum()))
    if costs.size > dp:
        largest = np.sort(np.partition(costs, costs.size - dp - 1)[costs.size - dp - 1 :])
        bound = max(bound, int(largest[0] + largest[1]))
    return bound

"""How few micro-batches can hold a step: a lower bound and a packing that is close to it."""

from __future__ import annotations

import bisect

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


def best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing: each item, longest first, into the fullest bin it fits.

    Args:
        lengths: Laid-out tokens of each sample [S]; one longer than `capacity` is alone.
        capacity: Tokens that a bin holds.

    Returns:
        Sample numbers of each bin, in the order in which bins were opened.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, bin), sorted
    sizes = lengths.tolist()
    for item in np.argsort(-lengths, kind="stable").tolist():
        size = sizes[item]
        place = bisect.bisect_left(free, (size, -1))
        if place < len(free):
            room, number = free.pop(place)
            bins[number].append(item)
        else:
            room, number = capacity, len(bins)
            bins.append([item])
        if size < room:
            bisect.insort(free, (room - size, number))
    return bins

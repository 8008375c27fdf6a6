"""Micro-batches onto DP ranks: rows of alike ones, rank sums balanced by differencing."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


def deal_rows(costs: NDArray[np.int64], dp: int, width: int) -> NDArray[np.int64]:
    """Place micro-batches in rows (k-th of all ranks) and on ranks.

    Sorted by cost they are cut into rows of `width`, so that a row costs about the same
    everywhere. Rows narrower than dp are those of a group of ranks in lock-step: a row costs what
    its dearest does, and is dealt to a group as one.

    Rows of all ranks stay whole, and their members are dealt.
    Which rank gets which of a row is found by differencing (Karmarkar and Karp, 1982, for
    tuples): the two rows of largest spread are merged, dearest against cheapest, until one is
    left. Rows keep their members, so lock-step costs nothing for the balance of rank sums.

    Args:
        costs: Cost of each micro-batch [dp · M], dummies included.
        dp: Number of ranks.
        width: Ranks in a group; divides dp.

    Returns:
        Micro-batch at [k, r], rows from dearest to cheapest, shape [M, dp].
    """
    if width < dp:
        rows = np.argsort(-costs, kind="stable").reshape(-1, width)
        groups = dp // width
        places = deal_rows(costs[rows[:, 0]], groups, groups)
        return rows[places].reshape(-1, dp)
    rows = np.argsort(-costs, kind="stable").reshape(-1, dp)
    sums = list(costs[rows])
    heap = [(-int(np.ptp(row)), number) for number, row in enumerate(sums)]
    heapq.heapify(heap)
    merges: list[tuple[int, int, NDArray[np.int64], NDArray[np.int64]]] = []
    while len(heap) > 1:
        _, kept = heapq.heappop(heap)
        _, gone = heapq.heappop(heap)
        ascending = np.argsort(sums[kept], kind="stable")
        descending = np.argsort(-sums[gone], kind="stable")
        sums[kept] = sums[kept][ascending] + sums[gone][descending]
        merges.append((kept, gone, ascending, descending))
        heapq.heappush(heap, (-int(np.ptp(sums[kept])), kept))
    # Slot of each rank in every row, undone from the last merge to the first.
    slots = [np.arange(dp)] * len(sums)
    for kept, gone, ascending, descending in reversed(merges):
        slots[gone] = descending[slots[kept]]
        slots[kept] = ascending[slots[kept]]
    return np.take_along_axis(rows, np.stack(slots), axis=1)

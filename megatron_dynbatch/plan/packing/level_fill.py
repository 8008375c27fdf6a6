"""Construction: rows of micro-batches filled to a level of cost, largest samples first.

A row is the k-th micro-batch of every DP rank; they run side by side, so a row should cost the
same everywhere. Rows are seeded with the largest samples left and filled with the largest ones
that keep both the token cap and the row's level. The level of a row is its costliest seed, or
what is left to place per micro-batch if that is more. Seeds that nothing can match sit in the
first rows together, and later rows are flat.

Everything is done a round at a time for all micro-batches of a row (each round gives each of
them one sample, or several while there is room for many), so the work is NumPy's: rounds · n.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.packing.problem import Items

# Rows are filled in at most this many batches of rows; more changes the result by < 0.1 %.
MAX_ROW_BATCHES = 16
# With room for this many of the largest items left, a micro-batch gets several at once.
MANY = 4


class _Bins:
    """Micro-batches being filled: number k·dp + r is the k-th of rank r."""

    def __init__(self, items: Items, dp: int, num_rows: int) -> None:
        count = dp * num_rows
        self.items = items
        self.bin_of = np.full(items.sizes.size, -1, dtype=np.int64)
        self.tokens = np.zeros(count, dtype=np.int64)
        self.costs = np.zeros(count, dtype=np.int64)
        self.levels = np.zeros(count, dtype=np.int64)
        self.logit_rows = np.zeros(count, dtype=np.int64)

    def add(self, bins: NDArray[np.int64], chosen: NDArray[np.int64]) -> None:
        """Put the items chosen[:, i] into bin bins[i]; bins are distinct."""
        self.bin_of[chosen] = bins
        self.tokens[bins] += self.items.sizes[chosen].sum(axis=0)
        self.costs[bins] += self.items.costs[chosen].sum(axis=0)
        if self.items.logit_rows is not None:
            self.logit_rows[bins] += self.items.logit_rows[chosen].sum(axis=0)


def fill_rows(
    items: Items, dp: int, num_rows: int, *, by_rank: bool, slack: float
) -> NDArray[np.int64] | None:
    """Fill num_rows rows of dp micro-batches.

    Args:
        items: The samples, at least dp · num_rows of them.
        dp: Micro-batches in a row.
        num_rows: M.
        by_rank: Levels follow what each rank still lacks of its share of the total, so that
            rank sums come out equal; else a row has one level, so that lock-step loses least.
        slack: Levels are raised by this factor (1.0 and a little): samples that fit nowhere
            below the levels are placed last, where most room is left.

    Returns:
        The micro-batch of each item [S], number k·dp + r; None if some item found no room.
    """
    bins = _Bins(items, dp, num_rows)
    left = np.arange(items.sizes.size)
    loads = np.zeros(dp, dtype=np.int64)
    total = int(items.costs.sum())
    rows_at_once = max(1, num_rows // MAX_ROW_BATCHES)
    row = 0
    while row < num_rows:
        num = min(rows_at_once, num_rows - row)
        batch = np.arange(row * dp, (row + num) * dp)
        seeds = left[left.size - batch.size :][::-1]
        left = left[: left.size - batch.size]
        if by_rank:
            seeds = _deal_seeds(seeds.reshape(num, dp), items.costs, loads)
        bins.add(batch, seeds[None])
        rows_left = num_rows - row
        mean = slack * (total - int(loads.sum())) / (dp * rows_left)
        highest = int(bins.costs[batch].max())
        if by_rank:
            budgets = np.tile((slack * total / dp - loads) / rows_left, num)
            levels = np.maximum(budgets, highest) if highest > mean else budgets
        else:
            levels = np.full(batch.size, max(highest, mean))
        bins.levels[batch] = np.minimum(levels, total).astype(np.int64)
        left = _fill_batch(bins, batch, left, keep=(num_rows - row - num) * dp)
        loads += bins.costs[batch].reshape(num, dp).sum(axis=0)
        row += num
    return bins.bin_of if _place_rest(bins, left) else None


def longest_first(items: Items, dp: int, num_rows: int) -> NDArray[np.int64] | None:
    """LPT under the caps: each item, largest first, into the cheapest micro-batch with room.

    Returns:
        As `fill_rows`.
    """
    bins = _Bins(items, dp, num_rows)
    return bins.bin_of if _place_rest(bins, np.arange(items.sizes.size)) else None


def _deal_seeds(
    seeds: NDArray[np.int64], costs: NDArray[np.int64], loads: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Within each row of seeds [rows, dp], the largest to the least loaded rank."""
    dealt = np.empty_like(seeds)
    running = loads.copy()
    for row, line in enumerate(seeds):
        ranks = np.argsort(running, kind="stable")
        dealt[row, ranks] = line
        running[ranks] += costs[line]
    return dealt.ravel()


def _fill_batch(
    bins: _Bins, batch: NDArray[np.int64], left: NDArray[np.int64], keep: int
) -> NDArray[np.int64]:
    """Rounds of one item per micro-batch until nothing fits; leaves at least `keep` items."""
    items = bins.items
    if items.logit_rows is None:
        left = _fill_coarsely(bins, batch, left, keep)
    # A micro-batch whose largest fitting sample breaks the logit cap looks below that one next.
    ceilings = np.full(batch.size, items.capacity, dtype=np.int64)
    numbers = np.arange(batch.size)
    while left.size > keep:
        affordable = np.searchsorted(
            items.costs, bins.levels[batch] - bins.costs[batch], side="right"
        )
        largest = np.where(affordable > 0, items.sizes[affordable - 1], 0)
        limits = np.minimum(np.minimum(items.capacity - bins.tokens[batch], ceilings), largest)
        places = np.searchsorted(items.sizes[left], limits, side="right")
        order = np.argsort(-places, kind="stable")
        # The largest item that fits and that no micro-batch earlier in the order took.
        picks = np.minimum.accumulate(places[order] - 1 + numbers) - numbers
        count = min(int(np.count_nonzero(picks >= 0)), left.size - keep)
        if count == 0:
            break
        picks, takers = picks[:count], order[:count]
        if items.logit_rows is not None:
            room = items.logit_capacity - bins.logit_rows[batch[takers]]
            fits = items.logit_rows[left[picks]] <= room
            ceilings[takers[~fits]] = items.sizes[left[picks[~fits]]] - 1
            picks, takers = picks[fits], takers[fits]
        bins.add(batch[takers], left[picks][None])
        remains = np.ones(left.size, dtype=bool)
        remains[picks] = False
        left = left[remains]
    return left


def _fill_coarsely(
    bins: _Bins, batch: NDArray[np.int64], left: NDArray[np.int64], keep: int
) -> NDArray[np.int64]:
    """Several of the largest items at once to micro-batches with room for many of their size."""
    items = bins.items
    while left.size > keep:
        size, cost = int(items.sizes[left[-1]]), int(items.costs[left[-1]])
        room = (items.capacity - bins.tokens[batch]) // size
        laps_each = np.minimum(room, (bins.levels[batch] - bins.costs[batch]) // cost)
        takers = np.flatnonzero(laps_each >= max(MANY, (int(laps_each.max()) + 1) // 2))
        if not takers.size:
            break
        laps = min(int(laps_each[takers].min()) - 1, (left.size - keep) // takers.size)
        if laps < 1:
            break
        chosen = left[left.size - laps * takers.size :][::-1].reshape(laps, takers.size).copy()
        # Back and forth, so that every micro-batch gets about the same.
        chosen[1::2] = chosen[1::2, ::-1].copy()
        bins.add(batch[takers], chosen)
        left = left[: left.size - chosen.size]
    return left


def _place_rest(bins: _Bins, left: NDArray[np.int64]) -> bool:
    """Each item left, largest first, where its cost exceeds the level least; False: no room."""
    items = bins.items
    if not left.size:
        return True
    spaces, smallest = items.capacity - bins.tokens, int(items.sizes[left[0]])
    usable = spaces[spaces >= smallest]
    if not usable.size or usable.max() < items.sizes[left[-1]]:
        return False
    if usable.sum() < items.sizes[left].sum() or (usable // smallest).sum() < left.size:
        return False
    heap = list(zip((bins.costs - bins.levels).tolist(), range(bins.costs.size), strict=True))
    heapq.heapify(heap)
    rooms = spaces.tolist()
    too_full: list[tuple[int, int, int]] = []  # (-room, excess, bin), fullest last
    for item in left[::-1].tolist():
        size, cost = int(items.sizes[item]), int(items.costs[item])
        rows = 0 if items.logit_rows is None else int(items.logit_rows[item])
        while too_full and -too_full[0][0] >= size:
            _, excess, number = heapq.heappop(too_full)
            heapq.heappush(heap, (excess, number))
        refused: list[tuple[int, int]] = []
        while heap:
            excess, number = heapq.heappop(heap)
            if rooms[number] < size:
                heapq.heappush(too_full, (-rooms[number], excess, number))
            elif rows and bins.logit_rows[number] + rows > items.logit_capacity:
                refused.append((excess, number))
            else:
                break
        else:
            return False
        bins.bin_of[item] = number
        bins.logit_rows[number] += rows
        rooms[number] -= size
        heapq.heappush(heap, (excess + cost, number))
        for entry in refused:
            heapq.heappush(heap, entry)
    return True

"""Construction for tight steps: each micro-batch filled to the brim, as few as can be.

Each micro-batch is opened with the largest sample left and closed by one, two or three others
whose sum is what it lacks, found with bit sets over lengths: bit s of `present` says that a
sample of length s is left; `present` AND its mirror image, shifted, has a bit for each pair of
a given sum. A micro-batch may stay as empty as the average room allows, no emptier if any such
closing is found. (A relative of the minimum-bin-slack heuristic of Gupta and Ho, 1999.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray

# Work per micro-batch: firsts tried for a triple, and sums tried for a pair, which are fewer the
# more micro-batches there are (dense lengths make the first sums succeed).
TRIPLE_FIRSTS = 6
FEWEST_PAIR_SUMS = 16
MOST_PAIR_SUMS = 256
PAIR_SUMS_IN_ALL = 1 << 16


class _Lengths:
    """A multiset of lengths with the sums of pairs at hand."""

    def __init__(self, lengths: list[int], capacity: int) -> None:
        self.capacity = capacity
        self.counts = Counter(lengths)
        self.sorted = sorted(self.counts)
        self.total = sum(lengths)
        sums = PAIR_SUMS_IN_ALL // max(1, len(lengths))
        self.num_pair_sums = min(MOST_PAIR_SUMS, max(FEWEST_PAIR_SUMS, sums))
        self.present = 0
        self.mirror = 0
        for length in self.counts:
            self.present |= 1 << length
            self.mirror |= 1 << (capacity - length)

    def take(self, length: int) -> None:
        """Remove one sample of this length."""
        self.total -= length
        left = self.counts[length] - 1
        self.counts[length] = left
        if not left:
            self.present ^= 1 << length
            self.mirror ^= 1 << (self.capacity - length)
            del self.sorted[bisect_left(self.sorted, length)]

    def largest(self, limit: int) -> int:
        """The largest length that is at most `limit`; 0 if there is none."""
        place = bisect_right(self.sorted, limit)
        return self.sorted[place - 1] if place else 0

    def hide(self, length: int, sign: int) -> None:
        """Keep one sample of this length out of pairs (sign −1), or undo that (sign 1)."""
        before = self.counts[length]
        self.counts[length] = before + sign
        if min(before, before + sign) == 0:
            self.present ^= 1 << length
            self.mirror ^= 1 << (self.capacity - length)

    def pair(self, room: int, tolerance: int) -> list[int] | None:
        """Two samples, of lengths as alike as can be, that leave at most `tolerance` of `room`."""
        lowest = max(room - min(tolerance, self.num_pair_sums), 2 * self.sorted[0])
        highest = min(room, 2 * self.largest(room))
        for total in range(highest, lowest - 1, -1):
            half = (total + 1) // 2
            both = (self.present & (self.mirror >> (self.capacity - total))) >> half
            if both:
                first = half + (both & -both).bit_length() - 1
                if 2 * first != total or self.counts[first] > 1:
                    return [first, total - first]
        return None


def exact_fit(lengths: NDArray[np.int64], capacity: int, num_bins: int) -> list[list[int]]:
    """Pack samples into nearly full micro-batches.

    Args:
        lengths: Laid-out tokens of each sample [S]; one longer than `capacity` is alone.
        capacity: Tokens that a micro-batch holds.
        num_bins: Micro-batches hoped for; they share what room this leaves.

    Returns:
        Sample numbers of each micro-batch; more than `num_bins` where this construction fails.
    """
    fitting = lengths <= capacity
    bins = [[item] for item in np.flatnonzero(~fitting).tolist()]
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    items, sizes = np.flatnonzero(fitting)[::-1].tolist(), lengths[fitting].tolist()
    for item, size in zip(items, reversed(sizes), strict=True):
        by_length[size].append(item)
    left = _Lengths(sizes, capacity)
    while left.total:
        bins_left = max(1, num_bins - len(bins))
        tolerance = max(0, bins_left * capacity - left.total) // bins_left
        bins.append([by_length[length].pop() for length in _fill_one(left, tolerance)])
    return bins


def _fill_one(left: _Lengths, tolerance: int) -> list[int]:
    """Lengths of one micro-batch, taken out of `left`."""
    taken = [left.sorted[-1]]
    left.take(taken[0])
    room = left.capacity - taken[0]
    while largest := left.largest(room):
        closing = [largest]
        if room <= 3 * largest + tolerance:
            closing = _closing(left, room, largest, tolerance)
        for length in closing:
            left.take(length)
            room -= length
        taken += closing
    return taken


def _closing(left: _Lengths, room: int, largest: int, tolerance: int) -> list[int]:
    """Up to three lengths that leave at most `tolerance` of `room`; else the largest alone."""
    smallest = left.sorted[0]
    if room - largest <= tolerance or room < 2 * smallest:
        return [largest]
    pair = left.pair(room, tolerance)
    if pair:
        return pair
    first = largest if room >= 3 * smallest else 0
    for _ in range(TRIPLE_FIRSTS):
        if not first or first == room:
            break
        left.hide(first, -1)
        pair = left.pair(room - first, tolerance)
        left.hide(first, 1)
        if pair:
            return [first, *pair]
        first = left.largest(first - 1)
    return [largest]

"""Construction for tight steps: each micro-batch filled to the brim, as few as can be.

Each micro-batch is opened with the largest sample left and closed by one, two or three others
whose sum is what it lacks, found with bit sets over lengths: bit s of `present` says that a
sample of length s is left; `present` AND its mirror image, shifted, has a bit for each pair of
a given sum. A micro-batch may stay as empty as the average room allows, no emptier if any such
closing is found. (A relative of the minimum-bin-slack heuristic of Gupta and Ho, 1999.)
"""

from __future__ import annotations

from collections import Counter

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
        self.counts[length] -= 1
        if not self.counts[length]:
            self.present ^= 1 << length
            self.mirror ^= 1 << (self.capacity - length)

    def largest(self, limit: int) -> int:
        """The largest length that is at most `limit`; 0 if there is none."""
        return max(0, (self.present & ((2 << limit) - 1)).bit_length() - 1) if limit > 0 else 0

    @property
    def smallest(self) -> int:
        return (self.present & -self.present).bit_length() - 1

    def put_back(self, length: int) -> None:
        """Undo `take`."""
        self.total += length
        self.counts[length] += 1
        self.present |= 1 << length
        self.mirror |= 1 << (self.capacity - length)

    def pair(self, room: int, tolerance: int) -> list[int] | None:
        """Two samples, of lengths as alike as can be, that leave at most `tolerance` of `room`."""
        lowest = max(room - min(tolerance, self.num_pair_sums), 2 * self.smallest)
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
    by_length: dict[int, list[int]] = {}
    for item in np.flatnonzero(fitting)[::-1].tolist():
        by_length.setdefault(int(lengths[item]), []).append(item)
    left = _Lengths(lengths[fitting].tolist(), capacity)
    while left.total:
        bins_left = max(1, num_bins - len(bins))
        tolerance = max(0, bins_left * capacity - left.total) // bins_left
        bins.append([by_length[length].pop() for length in _fill_one(left, tolerance)])
    return bins


def _fill_one(left: _Lengths, tolerance: int) -> list[int]:
    """Lengths of one micro-batch, taken out of `left`."""
    taken = [left.largest(left.capacity)]
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
    if room - largest <= tolerance:
        return [largest]
    pair = left.pair(room, tolerance)
    if pair:
        return pair
    first = largest
    for _ in range(TRIPLE_FIRSTS):
        if not first or first == room:
            break
        left.take(first)
        pair = left.pair(room - first, tolerance)
        left.put_back(first)
        if pair:
            return [first, *pair]
        first = left.largest(first - 1)
    return [largest]

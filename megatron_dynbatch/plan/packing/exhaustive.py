"""Depth-first search, for steps of few samples: packings, and placements of the least time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.packing.problem import Items

# Enough for the worst of many random steps of 16 samples; more samples may remain undecided.
MOST_SAMPLES = 24
MOST_NODES = 50_000
# Steps whose best placement is searched for. Of 16 samples in one row, 190 random steps took 4 500
# nodes at most; with more rows the search may end undecided.
MOST_PLACED = 16
MOST_PLACEMENT_NODES = 10_000
MOST_NODES_OF_ROWS = 5_000


def search_packing(
    lengths: NDArray[np.int64], capacity: int, num_bins: int
) -> list[list[int]] | None:
    """Pack samples into exactly num_bins or fewer micro-batches, if the search finds a way.

    Samples are placed longest first, each in every micro-batch that it fits and that differs in
    room from those tried before; branches whose waste exceeds what may be wasted are cut.

    Args:
        lengths: Laid-out tokens of each sample [S]; one longer than `capacity` is alone.
        capacity: Tokens that a micro-batch holds.
        num_bins: Micro-batches at most.

    Returns:
        Sample numbers of each micro-batch, or None: impossible, or not found in MOST_NODES.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-int(lengths[item]), item))
    sizes = [min(int(lengths[item]), capacity) for item in order]
    rooms = [capacity] * num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    nodes = 0

    def place(depth: int, spare: int) -> bool:
        nonlocal nodes
        if depth == len(sizes):
            return True
        nodes += 1
        if nodes > MOST_NODES:
            return False
        tried: set[int] = set()
        for number, room in enumerate(rooms):
            if room < sizes[depth] or room in tried:
                continue
            tried.add(room)
            # Room that not even the smallest sample fits is wasted for good.
            rest = room - sizes[depth]
            wasted = rest if rest < sizes[-1] else 0
            if wasted > spare:
                continue
            rooms[number] = rest
            bins[number].append(order[depth])
            if place(depth + 1, spare - wasted):
                return True
            rooms[number] = room
            bins[number].pop()
        return False

    spare = num_bins * capacity - sum(sizes)
    if spare < 0 or not place(0, spare):
        return None
    return [members for members in bins if members]


class PlacementSearch:
    """The placement of the least time at a count: the most loaded rank, or rows in lock-step.

    Samples go costliest first into every micro-batch with room; of micro-batches between which
    nothing tells, one is tried. A branch ends where its figure reaches the best one known, or
    where ranks that are too full for any sample left leave others with more than that.
    """

    def __init__(self, items: Items, dp: int, num_rows: int, in_lockstep: bool) -> None:
        self.items, self.dp, self.in_lockstep = items, dp, in_lockstep
        self.sizes, self.costs = items.sizes.tolist(), items.costs.tolist()
        none = [0] * len(self.sizes)
        self.rows = none if items.logit_rows is None else items.logit_rows.tolist()
        num_bins = dp * num_rows
        self.tokens, self.loads, self.logits = ([0] * num_bins for _ in range(3))
        self.total = sum(self.costs)
        # With one row, ranks in lock-step wait for the dearest of them like any others.
        self.by_rank = not in_lockstep or num_rows == 1
        self.most_nodes = MOST_PLACEMENT_NODES if num_rows == 1 else MOST_NODES_OF_ROWS
        self.bin_of = [0] * len(self.sizes)
        self.num_empty = num_bins
        self.nodes = 0
        self.found: list[int] | None = None

    def run(self, limit: int) -> NDArray[np.int64] | None:
        """Micro-batch k·dp + r of each item [S] with the least figure below `limit`, if any.

        In lock-step the numbers say what is together, not in which row.
        """
        self.limit = limit
        self._place(len(self.sizes) - 1)
        return None if self.found is None else np.array(self.found, dtype=np.int64)

    def _figure(self) -> int:
        if self.in_lockstep:
            return sum(sorted(self.loads, reverse=True)[:: self.dp])
        return max(sum(self.loads[rank :: self.dp]) for rank in range(self.dp))

    def _is_hopeless(self) -> bool:
        """Whether the room below the limit that no sample fits any more is too much."""
        spare = self.dp * (self.limit - 1) - self.total
        for rank in range(self.dp):
            room = self.limit - 1 - sum(self.loads[rank :: self.dp])
            spare -= room if room < self.costs[0] else 0
        return spare < 0

    def _place(self, item: int) -> None:
        if item < 0:
            self.limit, self.found = self._figure(), self.bin_of[:]
            return
        if self.by_rank and self._is_hopeless():
            return
        self.nodes += 1
        size, cost, rows = self.sizes[item], self.costs[item], self.rows[item]
        tried: set[tuple[object, ...]] = set()
        for number, tokens in enumerate(self.tokens):
            is_empty = not tokens
            if self.nodes > self.most_nodes or self.num_empty - is_empty > item:
                continue
            fits = tokens + size <= self.items.capacity
            fits = fits and self.logits[number] + rows <= self.items.logit_capacity
            state = (self._rank_state(number), tokens, self.loads[number], self.logits[number])
            if not (fits or is_empty) or state in tried:
                continue
            tried.add(state)
            self._add(number, size, cost, rows, is_empty)
            if self._figure() < self.limit:
                self.bin_of[item] = number
                self._place(item - 1)
            self._add(number, -size, -cost, -rows, is_empty)

    def _add(self, number: int, size: int, cost: int, rows: int, is_empty: bool) -> None:
        self.tokens[number] += size
        self.loads[number] += cost
        self.logits[number] += rows
        if is_empty:
            self.num_empty -= 1 if size > 0 else -1

    def _rank_state(self, number: int) -> tuple[object, ...]:
        if self.in_lockstep:
            return ()
        mine = range(number % self.dp, len(self.tokens), self.dp)
        return tuple(sorted((self.tokens[i], self.loads[i], self.logits[i]) for i in mine))

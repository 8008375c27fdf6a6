"""Bin packing by depth-first search, for steps of few samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Enough for the worst of many random steps of 16 samples; more samples may remain undecided.
MOST_SAMPLES = 24
MOST_NODES = 50_000


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

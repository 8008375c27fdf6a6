"""Micro-batches onto DP ranks: the k-th micro-batches of all ranks alike, rank sums balanced."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal_rows(costs: Sequence[int], dp: int, num_microbatches: int) -> list[list[int]]:
    """Deal micro-batches to ranks row by row.

    Micro-batches sorted by cost are cut into rows of dp; within a row the costliest goes to the
    least loaded rank. So the k-th micro-batches of all ranks cost about the same.

    Args:
        costs: Cost of each micro-batch, at most dp · num_microbatches of them.
        dp: Number of ranks.
        num_microbatches: Micro-batches per rank; missing ones are dummies.

    Returns:
        For each rank num_microbatches entries: a micro-batch's number, or −1 for a dummy.
    """
    order = sorted(range(len(costs)), key=lambda number: (-costs[number], number))
    order += [-1] * (dp * num_microbatches - len(costs))
    ranks: list[list[int]] = [[] for _ in range(dp)]
    loads = [0] * dp
    for start in range(0, len(order), dp):
        heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(heap)
        for number in order[start : start + dp]:
            load, rank = heapq.heappop(heap)
            ranks[rank].append(number)
            loads[rank] = load + (costs[number] if number >= 0 else 0)
    return ranks

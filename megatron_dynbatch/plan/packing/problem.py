"""The packing problem of one step and its answer: samples with sizes, and where they are placed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class Items:
    """Samples of a step, sorted by size, and the room of a micro-batch.

    Attributes:
        order: Which sample of the step each item is [S].
        sizes: Laid-out tokens [S], ascending.
        costs: Integer costs [S], ascending.
        logit_rows: Rows of logits [S], or None without such a cap.
        capacity: Tokens that a micro-batch holds; a larger sample is alone.
        logit_capacity: Logit rows that a micro-batch holds.
    """

    order: NDArray[np.int64]
    sizes: NDArray[np.int64]
    costs: NDArray[np.int64]
    logit_rows: NDArray[np.int64] | None
    capacity: int
    logit_capacity: int

    def fill_share(self, num_bins: int) -> float:
        """Share of the room of so many micro-batches that the samples need."""
        return int(self.sizes.sum()) / (num_bins * self.capacity)


class Placement:
    """Samples in micro-batches: number k·dp + r is the k-th micro-batch of rank r.

    Attributes:
        bin_of: Micro-batch of each item [S].
        tokens: Laid-out tokens of each micro-batch [M · dp].
        costs: Cost of each micro-batch [M · dp].
        logit_rows: Rows of logits of each micro-batch [M · dp].
        counts: Samples of each micro-batch [M · dp].
    """

    def __init__(self, items: Items, bin_of: NDArray[np.int64], dp: int, num_rows: int) -> None:
        self.items = items
        self.bin_of = bin_of
        self.dp = dp
        self.num_rows = num_rows
        self.tokens = self._sums(items.sizes)
        self.costs = self._sums(items.costs)
        zeros = np.zeros_like(items.sizes)
        self.rows_of_item = zeros if items.logit_rows is None else items.logit_rows
        self.logit_rows = self._sums(self.rows_of_item)
        self.counts = np.bincount(bin_of, minlength=dp * num_rows)
        self._ranks: NDArray[np.int64] | None = None

    def _sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.zeros(self.dp * self.num_rows, dtype=np.int64)
        np.add.at(sums, self.bin_of, values)
        return sums

    @property
    def grid(self) -> NDArray[np.int64]:
        """Costs [M, dp], a view."""
        return self.costs.reshape(self.num_rows, self.dp)

    @property
    def loads(self) -> NDArray[np.int64]:
        """Cost of each rank [dp]."""
        return self.grid.sum(axis=0)

    @property
    def rank_of(self) -> NDArray[np.int64]:
        """Rank of each item [S]."""
        if self._ranks is None:
            self._ranks = self.bin_of % self.dp
        return self._ranks

    @property
    def lockstep_cost(self) -> int:
        """Σ over rows of the dearest micro-batch."""
        return int(self.grid.max(axis=1).sum())

    def renumber(self, places: NDArray[np.int64]) -> None:
        """Micro-batch places[k, r] becomes the k-th of rank r; places is [M, dp]."""
        self.num_rows, self.dp = places.shape
        self._ranks = None
        old = places.ravel()
        new = np.empty_like(old)
        new[old] = np.arange(old.size)
        self.bin_of = new[self.bin_of]
        for name in ("tokens", "costs", "logit_rows", "counts"):
            setattr(self, name, getattr(self, name)[old])

    def align(self) -> None:
        """Each rank runs its micro-batches from dearest to cheapest."""
        numbers = np.arange(self.costs.size).reshape(self.num_rows, self.dp)
        by_cost = np.argsort(-self.grid, axis=0, kind="stable")
        self.renumber(np.take_along_axis(numbers, by_cost, axis=0))

    def regroup(self, dp: int) -> None:
        """See the same micro-batches, by the same numbers, as rows of another width."""
        self.dp, self.num_rows = dp, self.costs.size // dp
        self._ranks = None

    def bins(self) -> list[list[int]]:
        """Items of each micro-batch [M · dp], ascending."""
        return self._listed(np.arange(self.bin_of.size))

    def micro_batches(self, rows: NDArray[np.int64] | None = None) -> list[list[list[int]]]:
        """Samples of the step in each micro-batch [dp][M], ascending; an empty one is a dummy.

        Args:
            rows: What the samples of the step are called [S], ascending; default 0 to S − 1.
        """
        bins = self._listed(self.items.order if rows is None else rows[self.items.order])
        return [bins[rank :: self.dp] for rank in range(self.dp)]

    def _listed(self, names: NDArray[np.int64]) -> list[list[int]]:
        """What the items of each micro-batch are called, ascending."""
        listed = names[np.lexsort((names, self.bin_of))].tolist()
        ends = np.cumsum(self.counts).tolist()
        counts = self.counts.tolist()
        return [listed[end - count : end] for count, end in zip(counts, ends, strict=True)]

    def move(self, item: int, number: int) -> None:
        """Put an item into another micro-batch."""
        source = self.bin_of[item]
        for sums, value in (
            (self.tokens, self.items.sizes[item]),
            (self.costs, self.items.costs[item]),
            (self.logit_rows, self.rows_of_item[item]),
            (self.counts, 1),
        ):
            sums[source] -= value
            sums[number] += value
        self.bin_of[item] = number
        if self._ranks is not None:
            self._ranks[item] = number % self.dp

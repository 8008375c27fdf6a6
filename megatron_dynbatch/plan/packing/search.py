"""Local search on a finished placement: moves and swaps of single samples, a bounded number.

`even_rows` lowers the dearest micro-batch of a row (lock-step); `even_ranks` lowers the most
loaded rank (the barrier at the end of a step). Both only accept what improves their figure, so
they end by themselves; the bounds keep planning time in hand. Ties go to the lowest number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.packing.problem import Placement

# Pairs looked at in one proposal of `even_ranks`: MOST_CHOICES samples of either rank.
MOST_CHOICES = 96
# Ranks that the most loaded one may shift cost to.
MOST_PARTNERS = 8
# An exchange that leaves this share of the gap between two ranks, 1 / NEAR, is near enough.
NEAR = 16
NEVER = np.iinfo(np.int64).max
# Steps of more samples get fewer candidates and less search, which gain little there.
SEARCH_NUM_SAMPLES = 512
# Rank sums this close to even are left alone.
EVEN_ENOUGH = 4e-4


def even_rows(placement: Placement, max_proposals: int, max_load: int | None = None) -> None:
    """Lower the lock-step cost: take cost out of the dearest micro-batch of one row at a time.

    A sample of it moves to, or is swapped against a cheaper one of, a micro-batch that stays
    within its own row's dearest. Rows are tried in turn, those with most to gain first. With
    `max_load` no rank is loaded beyond it.
    """
    if placement.dp == 1:
        return
    stuck: set[int] = set()
    for _ in range(max_proposals):
        grid = placement.grid
        gains = grid.max(axis=1) * placement.dp - grid.sum(axis=1)
        gains[list(stuck)] = 0
        row = int(gains.argmax())
        if gains[row] <= 0:
            break
        if _relieve(placement, row, max_load):
            stuck.clear()
        else:
            stuck.add(row)


def even_groups(placement: Placement, width: int, max_proposals: int) -> None:
    """Lower the group of `width` ranks in lock-step whose rows cost most in sum.

    Cost goes out of the dearest micro-batches of its rows, within bounds also into rows of the
    group whose rows cost least, until the two are about even.
    """
    dp, num_rows = placement.dp, placement.num_rows
    num_groups = dp // width
    # The rows of a group, seen as rows of a narrower placement: row k · groups + g.
    placement.regroup(width)
    for _ in range(max_proposals):
        dearest = placement.grid.max(axis=1)
        loads = dearest.reshape(num_rows, num_groups).sum(axis=0)
        high, low = int(loads.argmax()), int(loads.argmin())
        gap = int(loads[high] - loads[low])
        if gap <= EVEN_ENOUGH * loads[high]:
            break
        spare = np.zeros((num_rows, num_groups, width), dtype=np.int64)
        spare[:, low] = gap // 2
        rows = np.arange(num_rows) * num_groups + high
        rows = rows[np.argsort(-dearest[rows], kind="stable")]
        if not any(_relieve(placement, int(row), None, spare.ravel()) for row in rows):
            break
    placement.regroup(dp)


def even_ranks(placement: Placement, max_proposals: int, even_enough: float = EVEN_ENOUGH) -> None:
    """Lower the most loaded rank: shift cost to one of the least loaded.

    Among the moves and swaps of samples, and swaps of micro-batches, that even the two ranks out
    the one is taken that does so best and raises the lock-step cost least. Afterwards each rank
    runs its micro-batches from dearest to cheapest, so that rows stay alike. Rank sums within
    `even_enough` of the mean are left alone.
    """
    for _ in range(max_proposals):
        loads = placement.loads
        by_load = np.argsort(loads, kind="stable")
        high = int(by_load[-1])
        if loads[high] * placement.dp <= loads.sum() * (1 + even_enough):
            break
        lows = by_load[: min(MOST_PARTNERS, placement.dp - 1)].tolist()
        gaps = [(low, int(loads[high] - loads[low])) for low in lows]
        if any(_shift(placement, high, low, gap) for low, gap in gaps):
            continue
        # Where room is short, one long sample against two shorter ones still shifts cost.
        is_small = placement.bin_of.size <= SEARCH_NUM_SAMPLES
        if not (is_small and any(_shift(placement, high, low, gap, True) for low, gap in gaps)):
            break
    placement.align()


class _Exchanges:
    """All moves and swaps of samples out of some micro-batches into others, as a matrix.

    Row i is sample givers[i]; column j swaps it against sample takers[j] (and seconds[j], of the
    same micro-batch, if given), or, for the last columns, moves it into one of `targets`. `bins`
    is the micro-batch that each column changes.
    """

    def __init__(
        self,
        placement: Placement,
        givers: NDArray[np.int64],
        takers: NDArray[np.int64],
        targets: NDArray[np.int64],
        seconds: NDArray[np.int64] | None = None,
    ) -> None:
        self.placement, self.givers, self.takers = placement, givers, takers
        self.seconds = seconds
        self.sources = placement.bin_of[givers]
        self.bins = np.concatenate([placement.bin_of[takers], targets])
        items = placement.items
        self.shift = self._differences(items.costs)
        sizes = self._differences(items.sizes)
        fits = (self.shift > 0) & (placement.tokens[self.bins] + sizes <= items.capacity)
        fits &= self.sources[:, None] != self.bins
        if seconds is not None:
            fits &= placement.tokens[self.sources][:, None] - sizes <= items.capacity
        fits[:, takers.size :] &= (placement.counts[self.sources] > 1)[:, None]
        if items.logit_rows is not None:
            rows = self._differences(items.logit_rows)
            fits &= placement.logit_rows[self.bins] + rows <= items.logit_capacity
            fits &= placement.logit_rows[self.sources][:, None] - rows <= items.logit_capacity
        self.fits = fits

    def _differences(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """What each source loses and each target gains."""
        taken = np.zeros(self.bins.size, dtype=np.int64)
        taken[: self.takers.size] = values[self.takers]
        if self.seconds is not None:
            taken[: self.takers.size] += values[self.seconds]
        return values[self.givers][:, None] - taken

    def make(self, place: int) -> None:
        """Carry out the exchange at this flat place of the matrix."""
        giver, taker = divmod(place, self.bins.size)
        self.placement.move(int(self.givers[giver]), int(self.bins[taker]))
        if taker < self.takers.size:
            self.placement.move(int(self.takers[taker]), int(self.sources[giver]))
            if self.seconds is not None:
                self.placement.move(int(self.seconds[taker]), int(self.sources[giver]))


def _relieve(
    placement: Placement, row: int, max_load: int | None, spare: NDArray[np.int64] | int = 0
) -> bool:
    """The best single move or swap that lowers the dearest micro-batch of a row, if any.

    Other rows may become dearer by `spare`, for each micro-batch.
    """
    dp, line = placement.dp, placement.grid[row]
    dearest = row * dp + int(line.argmax())
    to_gain = int(line.max()) - int(np.partition(line, dp - 2)[dp - 2])
    room = np.repeat(placement.grid.max(axis=1), dp) - placement.costs + spare
    mine = placement.bin_of == dearest
    exchanges = _Exchanges(
        placement, np.flatnonzero(mine), np.flatnonzero(~mine), np.arange(placement.costs.size)
    )
    shift, bins = exchanges.shift, exchanges.bins
    gain = np.minimum(shift, to_gain)
    # In the same row the other one may come up to where the dearest comes down to.
    in_row = bins // dp == row
    gain[:, in_row] = np.minimum(gain, room[bins] - shift)[:, in_row]
    gain = np.where(exchanges.fits & (shift <= room[bins]), gain, 0)
    if max_load is not None:
        spare = (max_load - placement.loads)[bins % dp]
        gain = np.where((shift <= spare) | (bins % dp == dearest % dp), gain, 0)
    place = int(gain.argmax())
    if gain.flat[place] <= 0:
        return False
    exchanges.make(place)
    return True


def _shift(placement: Placement, high: int, low: int, gap: int, pairs: bool = False) -> bool:
    """The best exchange from rank `high` to rank `low`, whose loads differ by `gap`.

    With `pairs` a sample is swapped against two of one micro-batch, and nothing else is tried.
    """
    dp = placement.dp
    rank_of = placement.rank_of
    low_bins = np.arange(placement.num_rows) * dp + low
    givers = _thin(np.flatnonzero(rank_of == high))
    takers = _thin(np.flatnonzero(rank_of == low))
    if pairs:
        firsts, seconds = np.triu_indices(takers.size, 1)
        together = placement.bin_of[takers[firsts]] == placement.bin_of[takers[seconds]]
        firsts, seconds = takers[firsts[together]], takers[seconds[together]]
        exchanges = _Exchanges(placement, givers, firsts, low_bins[:0], seconds)
    else:
        exchanges = _Exchanges(placement, givers, takers, low_bins)
    if not exchanges.fits.size:
        return False
    dearest = placement.grid.max(axis=1)
    bins, shift = exchanges.bins, exchanges.shift
    raised = np.maximum(0, placement.costs[bins] + shift - dearest[bins // dp])
    score = np.abs(2 * shift - gap) + raised
    score = np.where(exchanges.fits & (shift < gap), score, NEVER)
    place = int(score.argmin())
    # Whole micro-batches are swapped where no exchange of samples comes near.
    swaps_bins = not pairs and placement.num_rows <= MOST_CHOICES
    if swaps_bins and score.flat[place] > gap // NEAR:
        costs = placement.costs
        swap = costs[low_bins - low + high][:, None] - costs[low_bins]
        raised = np.maximum(0, costs[low_bins - low + high][:, None] - dearest)
        swap_score = np.where(
            (swap > 0) & (swap < gap), np.abs(2 * swap - gap) + raised, NEVER
        ).ravel()
        swap_place = int(swap_score.argmin())
        if swap_score[swap_place] < score.flat[place]:
            giver, taker = divmod(swap_place, placement.num_rows)
            numbers = np.arange(placement.costs.size)
            pair = [giver * dp + high, taker * dp + low]
            numbers[pair] = pair[::-1]
            placement.renumber(numbers.reshape(placement.num_rows, dp))
            return True
    if score.flat[place] == NEVER:
        return False
    exchanges.make(place)
    return True


def _thin(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most MOST_CHOICES of them, evenly spread over the sizes."""
    if numbers.size <= MOST_CHOICES:
        return numbers
    return numbers[np.linspace(0, numbers.size - 1, MOST_CHOICES).astype(np.int64)]

"""Placements of a step at a given count: several constructions, each improved by local search.

What a layout pays for decides how rows are made. Ranks in lock-step (one expert-parallel group)
want the k-th micro-batches of all of them alike; ranks that only meet at the end of the step want
even sums; a pipeline wants all micro-batches alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.packing.bounds import makespan_bound
from megatron_dynbatch.plan.packing.differencing import deal_rows
from megatron_dynbatch.plan.packing.exhaustive import MOST_PLACED, PlacementSearch
from megatron_dynbatch.plan.packing.level_fill import fill_rows, longest_first
from megatron_dynbatch.plan.packing.problem import Items, Placement
from megatron_dynbatch.plan.packing.search import (
    EVEN_ENOUGH,
    SEARCH_NUM_SAMPLES,
    even_groups,
    even_ranks,
    even_rows,
)

# Slack of the levels, tried in turn until every sample finds room; the last is the cap alone.
SLACKS = (1.003, 1.02, float("inf"))
# Share of all room that is needed, from which on levels only get in the way.
TIGHT_FILL = 0.995
# Slacks of further candidates, where planning is quick.
MORE_SLACKS = (1.0005, 1.01)
RANK_SLACKS = (1.0005, 1.005)
# A placement whose ranks are further from even is not worth evening out.
NEARLY_EVEN = 1.05
MAX_PROPOSALS = 200
# Of larger steps a few rows are evened out where ranks run in lock-step: so many, and so many
# exchanges looked at in all, a micro-batch's samples against all samples each time.
MEDIUM_PROPOSALS = 40
MEDIUM_EXCHANGES = 600_000


def row_width(layout: ParallelLayout) -> int:
    """Micro-batches in a row: those of one lock-step group, or of all ranks if none wait."""
    group = layout.lockstep_ranks
    return group if group > 1 and layout.dp % group == 0 else layout.dp


def first_fill(items: Items, width: int, num_rows: int) -> NDArray[np.int64] | None:
    """Rows filled to the lowest levels at which every sample finds room, if there are any."""
    # Large steps that need nearly all room are not helped by levels, and failing takes time.
    is_large = items.sizes.size > SEARCH_NUM_SAMPLES
    hopeless = is_large and items.fill_share(width * num_rows) > TIGHT_FILL
    for slack in SLACKS[-1:] if hopeless else SLACKS:
        bin_of = fill_rows(items, width, num_rows, by_rank=False, slack=slack)
        if bin_of is not None:
            return bin_of
    return None


def constructions(
    items: Items, bin_of: NDArray[np.int64], num_rows: int, layout: ParallelLayout
) -> list[Placement]:
    """The best placement at a count or, where `order.fastest` has to find it, the good ones.

    Args:
        items: The samples, more than dp · num_rows of them.
        bin_of: A packing into dp · num_rows micro-batches, the micro-batch of each item [S].
        num_rows: M.
        layout: The parallel layout.
    """
    dp, num_bins = layout.dp, layout.dp * num_rows
    num_samples = items.sizes.size
    proposals = 0
    if num_samples <= SEARCH_NUM_SAMPLES:
        proposals = MAX_PROPOSALS
    elif layout.lockstep_ranks > 1:
        exchanges = num_samples * (num_samples + num_bins) // num_bins
        proposals = min(MEDIUM_PROPOSALS, MEDIUM_EXCHANGES // exchanges)
    best = _in_rows(items, bin_of, dp, num_bins, dp, proposals)
    finalists = [best]
    if layout.lockstep_ranks == 1 and not _is_even(best):
        finalists = _for_the_barrier(items, best)
        if layout.pp == 1:
            finalists = [min(finalists, key=_barrier_figure)]
    width = row_width(layout)
    if items.sizes.size <= MOST_PLACED and width == dp:
        searched = _searched(min(finalists, key=_barrier_figure), layout.lockstep_ranks > 1)
        if layout.pp == 1:
            return [searched]
        finalists.append(searched)
    if width < dp:
        finalists.append(_in_rows(items, bin_of, dp, num_bins, width, proposals))
        if items.sizes.size <= SEARCH_NUM_SAMPLES:
            for placement in finalists:
                even_groups(placement, width, MAX_PROPOSALS)
    if layout.pp > 1:
        flat = _in_rows(items, bin_of, dp, num_bins, num_bins, proposals)
        finalists.append(dealt(flat, dp, width))
    return finalists


def _in_rows(
    items: Items,
    bin_of: NDArray[np.int64],
    dp: int,
    num_bins: int,
    width: int,
    proposals: int,
) -> Placement:
    """The placement with the cheapest rows of `width` micro-batches, evened out so often."""
    num_rows = num_bins // width
    is_small = items.sizes.size <= SEARCH_NUM_SAMPLES
    candidates: list[NDArray[np.int64] | None] = [bin_of]
    if width != dp:
        candidates.append(first_fill(items, width, num_rows))
    if is_small:
        candidates += [
            fill_rows(items, width, num_rows, by_rank=False, slack=slack) for slack in MORE_SLACKS
        ]
        candidates.append(longest_first(items, width, num_rows))
    best = min(
        (
            _by_cost(Placement(items, numbers, width, num_rows))
            for numbers in candidates
            if numbers is not None
        ),
        key=lambda placement: placement.lockstep_cost,
    )
    even_rows(best, proposals)
    return dealt(best, dp, min(width, dp))


def _for_the_barrier(items: Items, best: Placement) -> list[Placement]:
    """Placements with rank sums as even as they get; `best` among them if that is no waste."""
    dp, num_rows = best.dp, best.num_rows
    is_small = items.sizes.size <= SEARCH_NUM_SAMPLES
    bound = makespan_bound(items.costs, dp)
    if not is_small and int(best.loads.max()) <= NEARLY_EVEN * bound:
        even_ranks(best, MAX_PROPOSALS + dp, 2 * EVEN_ENOUGH)
        if _is_even(best):
            return [best]
    finalists: list[Placement] = []
    for slack in RANK_SLACKS:
        other = fill_rows(items, dp, num_rows, by_rank=True, slack=slack)
        finalists += [] if other is None else [Placement(items, other, dp, num_rows)]
        if finalists and not is_small:
            break
    finalists.append(best)
    for placement in finalists:
        even_ranks(placement, MAX_PROPOSALS + dp, EVEN_ENOUGH * (1 if is_small else 2))
        if is_small:
            even_enough = int(bound * (1 + 2 * EVEN_ENOUGH))
            even_rows(placement, MAX_PROPOSALS, max(even_enough, int(placement.loads.max())))
    return finalists


def _searched(best: Placement, in_lockstep: bool) -> Placement:
    """The best placement of a step of few samples, or the one given if it is that."""
    items, dp, num_rows = best.items, best.dp, best.num_rows
    figure = best.lockstep_cost if in_lockstep else int(best.loads.max())
    if figure <= makespan_bound(items.costs, dp):
        return best
    bin_of = PlacementSearch(items, dp, num_rows, in_lockstep).run(figure)
    if bin_of is None:
        return best
    placement = Placement(items, bin_of, dp, num_rows)
    if in_lockstep:
        return dealt(placement, dp)
    placement.align()
    # The search looks at ranks alone; rows alike cost nothing and need less memory.
    even_rows(placement, MAX_PROPOSALS, int(placement.loads.max()))
    placement.align()
    return placement


def _barrier_figure(placement: Placement) -> tuple[int, int]:
    """What a step without lock-step costs: the most loaded rank; else equal, lock-step."""
    bound = makespan_bound(placement.items.costs, placement.dp)
    load = int(placement.loads.max())
    return (load if load > bound * (1 + 2 * EVEN_ENOUGH) else 0), placement.lockstep_cost


def _is_even(placement: Placement) -> bool:
    return _barrier_figure(placement)[0] == 0


def _by_cost(placement: Placement) -> Placement:
    """The same micro-batches, in rows of alike ones."""
    numbers = np.argsort(-placement.costs, kind="stable")
    placement.renumber(numbers.reshape(placement.num_rows, placement.dp))
    return placement


def dealt(placement: Placement, dp: int, width: int | None = None) -> Placement:
    """The same micro-batches, dealt to dp ranks in rows of `width` alike ones (default dp)."""
    placement.renumber(deal_rows(placement.costs, dp, width or dp))
    return placement

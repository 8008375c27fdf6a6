"""One step: samples into micro-batches, micro-batches onto DP ranks.

The count M is the smallest that some construction attains; constructions at that count compete
by what the layout pays for (`_figure`), and the winner is improved by local search.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.bounds import makespan_bound, martello_toth_bound
from megatron_dynbatch.plan.cost import integer_costs
from megatron_dynbatch.plan.decreasing import best_fit_decreasing, first_fit_two_caps
from megatron_dynbatch.plan.exact_fit import exact_fit
from megatron_dynbatch.plan.exhaustive import MOST_SAMPLES, search_packing
from megatron_dynbatch.plan.layout import ParallelLayout
from megatron_dynbatch.plan.level_fill import Items, fill_rows, longest_first
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.order import row_order
from megatron_dynbatch.plan.placement import deal_rows
from megatron_dynbatch.plan.search import EVEN_ENOUGH, Placement, even_ranks, even_rows
from megatron_dynbatch.plan.simple import expand_bins_by_splitting

# Slack of the levels, tried in turn until every sample finds room; the last is the cap alone.
SLACKS = (1.003, 1.02, float("inf"))
# Share of all room that is needed, from which on levels only get in the way.
TIGHT_FILL = 0.995
# Share up to which a large step whose tight packing is known is worth filling to levels.
LOOSE_FILL = 0.97
# Slacks of further candidates, where planning is quick.
MORE_SLACKS = (1.0005, 1.01)
RANK_SLACKS = (1.0005, 1.005)
# Steps of more samples get fewer candidates and no `even_rows`, which gain little there.
SEARCH_NUM_SAMPLES = 512
# A placement whose ranks are further from even is not worth evening out.
NEARLY_EVEN = 1.05
MAX_PROPOSALS = 200
UNLIMITED = 1 << 62


def pack_step(
    lengths: NDArray[np.int64],
    logit_rows: NDArray[np.int64] | None,
    layout: ParallelLayout,
    options: PlanOptions,
) -> Placement:
    """Micro-batches of the samples of a step.

    Args:
        lengths: Laid-out tokens of each sample [S].
        logit_rows: Rows of logits of each sample [S], if they are capped.
        layout: The parallel layout.
        options: Caps or micro-batch size, and the cost model.

    Returns:
        The placement; `Placement.items.order` says which sample each item is.
    """
    order = np.argsort(lengths, kind="stable")
    sizes = lengths[order]
    items = Items(
        order=order,
        sizes=sizes,
        # A measured cost may dip; rows are filled by binary search, which it must not mislead.
        costs=np.maximum.accumulate(integer_costs(options.cost.sample_costs(sizes))),
        logit_rows=None if logit_rows is None else logit_rows[order],
        capacity=options.capacity(layout) or UNLIMITED,
        logit_capacity=options.logit_capacity(layout) or UNLIMITED,
    )
    if options.micro_batch_size is not None:
        placement = _pack_static(items, options.micro_batch_size, layout)
    else:
        placement = _pack_dynamic(items, layout)
    grid = np.arange(placement.costs.size).reshape(placement.num_rows, layout.dp)
    placement.renumber(grid[row_order(placement.grid, layout, options.order)])
    return placement


def _pack_static(items: Items, micro_batch_size: int, layout: ParallelLayout) -> Placement:
    """At most `micro_batch_size` samples each, samples of like cost in a row."""
    num_samples, dp = items.sizes.size, layout.dp
    num_rows = layout.next_admissible(-(-num_samples // (dp * micro_batch_size)))
    num_bins = min(num_samples, dp * num_rows)
    # Rows of dp micro-batches take samples in order of cost, dealt back and forth.
    bin_of = np.empty(num_samples, dtype=np.int64)
    edges = np.arange(num_rows + 1) * dp
    edges = np.minimum(edges, num_bins) * num_samples // num_bins
    for row in range(num_rows):
        width = min(dp, num_bins - row * dp)
        members = np.arange(edges[row], edges[row + 1])[::-1]
        laps, places = np.divmod(np.arange(members.size), max(1, width))
        places = np.where(laps % 2 == 0, places, width - 1 - places)
        bin_of[members] = row * dp + places
    return _dealt(Placement(items, bin_of, dp, num_rows))


def _pack_dynamic(items: Items, layout: ParallelLayout) -> Placement:
    """As few micro-batches per rank as some construction attains, then the best placement."""
    dp = layout.dp
    num_rows = smallest_count(items, layout)
    if items.sizes.size <= dp * num_rows:
        return _alone(items, dp, num_rows)
    bin_of = _first_fill(items, dp, num_rows)
    if bin_of is None:
        bins = _tight_bins(items, dp * num_rows)
        num_rows = layout.next_admissible(-(-len(bins) // dp))
        if items.sizes.size <= dp * num_rows:
            return _alone(items, dp, num_rows)
        is_small = items.sizes.size <= SEARCH_NUM_SAMPLES
        if is_small or _fill_share(items, dp, num_rows) < LOOSE_FILL:
            bin_of = _first_fill(items, dp, num_rows)
        if bin_of is None:
            bin_of = _number(expand_bins_by_splitting(bins, dp * num_rows, items.costs.tolist()))
    return _best(items, bin_of, num_rows, layout)


def smallest_count(items: Items, layout: ParallelLayout) -> int:
    """Mmin: the smallest admissible count that the lower bounds do not rule out."""
    bound = martello_toth_bound(items.sizes, items.capacity)
    if items.logit_rows is not None:
        bound = max(bound, martello_toth_bound(items.logit_rows, items.logit_capacity))
    return layout.next_admissible(-(-bound // layout.dp))


def _fill_share(items: Items, dp: int, num_rows: int) -> float:
    """Share of the room of all micro-batches that the samples need."""
    return int(items.sizes.sum()) / (dp * num_rows * items.capacity)


def _first_fill(items: Items, dp: int, num_rows: int) -> NDArray[np.int64] | None:
    """Rows filled to the lowest levels at which every sample finds room, if there are any."""
    # Large steps that need nearly all room are not helped by levels, and failing takes time.
    is_large = items.sizes.size > SEARCH_NUM_SAMPLES
    hopeless = is_large and _fill_share(items, dp, num_rows) > TIGHT_FILL
    for slack in SLACKS[-1:] if hopeless else SLACKS:
        bin_of = fill_rows(items, dp, num_rows, by_rank=False, slack=slack)
        if bin_of is not None:
            return bin_of
    return None


def _tight_bins(items: Items, num_bins: int) -> list[list[int]]:
    """The fewest micro-batches that any packing by size alone finds."""
    if items.logit_rows is not None:
        return first_fit_two_caps(items)
    bins = best_fit_decreasing(items.sizes, items.capacity)
    if len(bins) > num_bins:
        bins = min(exact_fit(items.sizes, items.capacity, num_bins), bins, key=len)
    if len(bins) > num_bins and items.sizes.size <= MOST_SAMPLES:
        bins = search_packing(items.sizes, items.capacity, num_bins) or bins
    return bins


def _best(
    items: Items, bin_of: NDArray[np.int64], num_rows: int, layout: ParallelLayout
) -> Placement:
    """The best of several placements with the same count."""
    dp = layout.dp
    is_small = items.sizes.size <= SEARCH_NUM_SAMPLES
    candidates: list[NDArray[np.int64] | None] = [bin_of]
    if is_small:
        candidates += [
            fill_rows(items, dp, num_rows, by_rank=False, slack=slack) for slack in MORE_SLACKS
        ]
        candidates.append(longest_first(items, dp, num_rows))
    best = min(
        (
            _dealt(Placement(items, numbers, dp, num_rows))
            for numbers in candidates
            if numbers is not None
        ),
        key=lambda placement: placement.lockstep_cost,
    )
    if is_small:
        even_rows(best, MAX_PROPOSALS)
        best = _dealt(best)
    if layout.lockstep_ranks > 1 or _is_even(best):
        return best
    finalists: list[Placement] = []
    for slack in RANK_SLACKS:
        other = fill_rows(items, dp, num_rows, by_rank=True, slack=slack)
        finalists += [] if other is None else [Placement(items, other, dp, num_rows)]
        if finalists and not is_small:
            break
    bound = makespan_bound(items.costs, dp)
    if is_small or not finalists or int(best.loads.max()) <= NEARLY_EVEN * bound:
        finalists.append(best)
    for placement in finalists:
        even_ranks(placement, MAX_PROPOSALS + dp)
        if is_small:
            even_enough = int(bound * (1 + 2 * EVEN_ENOUGH))
            even_rows(placement, MAX_PROPOSALS, max(even_enough, int(placement.loads.max())))
    return min(finalists, key=_barrier_figure)


def _barrier_figure(placement: Placement) -> tuple[int, int]:
    """What a step without lock-step costs: the most loaded rank; else equal, lock-step."""
    bound = makespan_bound(placement.items.costs, placement.dp)
    load = int(placement.loads.max())
    return (load if load > bound * (1 + 2 * EVEN_ENOUGH) else 0), placement.lockstep_cost


def _is_even(placement: Placement) -> bool:
    return _barrier_figure(placement)[0] == 0


def _dealt(placement: Placement) -> Placement:
    placement.renumber(deal_rows(placement.costs, placement.dp))
    return placement


def _alone(items: Items, dp: int, num_rows: int) -> Placement:
    """Each sample a micro-batch, the rest of the dp · num_rows are dummies."""
    return _dealt(Placement(items, np.arange(items.sizes.size), dp, num_rows))


def _number(bins: list[list[int]]) -> NDArray[np.int64]:
    bin_of = np.empty(sum(len(members) for members in bins), dtype=np.int64)
    for number, members in enumerate(bins):
        bin_of[members] = number
    return bin_of

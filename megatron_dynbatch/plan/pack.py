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
from megatron_dynbatch.plan.layout import ParallelLayout
from megatron_dynbatch.plan.level_fill import Items, fill_rows
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.order import row_order
from megatron_dynbatch.plan.placement import deal_rows
from megatron_dynbatch.plan.search import EVEN_ENOUGH, Placement, even_ranks, even_rows
from megatron_dynbatch.plan.simple import expand_bins_by_splitting

# Slack of the levels, tried in turn until every sample finds room; the last is the cap alone.
SLACKS = (1.003, 1.02, float("inf"))
# Slacks of further candidates, where planning is quick.
MORE_SLACKS = (1.0005, 1.01)
RANK_SLACKS = (1.0005, 1.005)
QUICK_NUM_SAMPLES = 8192
# `even_rows` looks at all samples in a proposal and gains little in large steps.
SEARCH_NUM_SAMPLES = 1024
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


def _first_fill(items: Items, dp: int, num_rows: int) -> NDArray[np.int64] | None:
    for slack in SLACKS:
        bin_of = fill_rows(items, dp, num_rows, by_rank=False, slack=slack)
        if bin_of is not None:
            return bin_of
    return None


def _tight_bins(items: Items, num_bins: int) -> list[list[int]]:
    """The fewest micro-batches that any packing by size alone finds."""
    if items.logit_rows is not None:
        return first_fit_two_caps(items)
    bins = exact_fit(items.sizes, items.capacity, num_bins)
    if len(bins) > num_bins and items.sizes.size <= QUICK_NUM_SAMPLES:
        bins = min(bins, best_fit_decreasing(items.sizes, items.capacity), key=len)
    return bins


def _best(
    items: Items, bin_of: NDArray[np.int64], num_rows: int, layout: ParallelLayout
) -> Placement:
    """The best of several placements with the same count."""
    dp = layout.dp
    is_quick = items.sizes.size <= QUICK_NUM_SAMPLES
    candidates = [bin_of]
    for slack in MORE_SLACKS if is_quick else ():
        other = fill_rows(items, dp, num_rows, by_rank=False, slack=slack)
        candidates += [] if other is None else [other]
    best = min(
        (_dealt(Placement(items, numbers, dp, num_rows)) for numbers in candidates),
        key=lambda placement: placement.lockstep_cost,
    )
    if items.sizes.size <= SEARCH_NUM_SAMPLES:
        even_rows(best, MAX_PROPOSALS)
        best = _dealt(best)
    if layout.lockstep_ranks > 1 or _is_even(best):
        return best
    finalists = [best]
    for slack in RANK_SLACKS:
        other = fill_rows(items, dp, num_rows, by_rank=True, slack=slack)
        finalists += [] if other is None else [Placement(items, other, dp, num_rows)]
    for placement in finalists:
        even_ranks(placement, MAX_PROPOSALS + dp)
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

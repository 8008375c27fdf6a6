"""One step: samples into micro-batches, micro-batches onto DP ranks.

The count M is the smallest that some construction attains. Under pipeline parallelism, where more
micro-batches make a smaller bubble, the next count that the schedule accepts competes with it.
Constructions at a count compete by predicted step time (`order.fastest`).
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.cost import integer_costs, integer_gamma
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.packing.bounds import martello_toth_bound
from megatron_dynbatch.plan.packing.construct import (
    constructions,
    dealt,
    first_fill,
    row_width,
)
from megatron_dynbatch.plan.packing.decreasing import best_fit_decreasing, first_fit_two_caps
from megatron_dynbatch.plan.packing.exact_fit import exact_fit
from megatron_dynbatch.plan.packing.exhaustive import MOST_SAMPLES, search_packing
from megatron_dynbatch.plan.packing.order import fastest
from megatron_dynbatch.plan.packing.problem import Items, Placement
from megatron_dynbatch.plan.packing.search import SEARCH_NUM_SAMPLES
from megatron_dynbatch.plan.packing.splitting import expand_bins_by_splitting

# Share of all room up to which a large step whose tight packing is known is worth filling to
# levels.
LOOSE_FILL = 0.985
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
    costs = options.cost.sample_costs(sizes)
    items = Items(
        order=order,
        sizes=sizes,
        # A measured cost may dip; rows are filled by binary search, which it must not mislead.
        costs=np.maximum.accumulate(integer_costs(costs)),
        logit_rows=None if logit_rows is None else logit_rows[order],
        capacity=options.capacity(layout) or UNLIMITED,
        logit_capacity=options.logit_capacity(layout) or UNLIMITED,
    )
    if options.micro_batch_size is not None:
        finalists = [_pack_static(items, options.micro_batch_size, layout)]
    else:
        # At a fixed width each micro-batch takes as long as a full one: no more than needed.
        finalists = _pack_dynamic(items, layout, layout.pp > 1 and not options.fixed_width)
    return fastest(finalists, layout, options.order, integer_gamma(costs, options.cost.gamma))


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
    return dealt(Placement(items, bin_of, dp, num_rows), dp)


def _pack_dynamic(items: Items, layout: ParallelLayout, more: bool) -> list[Placement]:
    """Placements with as few micro-batches per rank as some construction attains.

    Args:
        items: The samples.
        layout: The parallel layout.
        more: Also those with the next count after Mmin, if that needs no dummy.
    """
    dp = layout.dp
    fewest = num_rows = smallest_count(items, layout)
    if items.sizes.size <= dp * num_rows:
        return [_alone(items, num_rows, layout)]
    bin_of = first_fill(items, dp, num_rows)
    if bin_of is None:
        bins = _tight_bins(items, dp * num_rows)
        num_rows = layout.next_admissible(-(-len(bins) // dp))
        if items.sizes.size <= dp * num_rows:
            return [_alone(items, num_rows, layout)]
        is_small = items.sizes.size <= SEARCH_NUM_SAMPLES
        if is_small or items.fill_share(dp * num_rows) < LOOSE_FILL:
            bin_of = first_fill(items, dp, num_rows)
        if bin_of is None:
            bin_of = _split(items, bins, dp * num_rows)
    finalists = constructions(items, bin_of, num_rows, layout)
    following = layout.next_admissible(fewest + 1)
    if more and num_rows < following and dp * following <= items.sizes.size:
        bin_of = first_fill(items, dp, following)
        if bin_of is None:
            bin_of = _split(items, finalists[0].bins(), dp * following)
        finalists += constructions(items, bin_of, following, layout)
    return finalists


def smallest_count(items: Items, layout: ParallelLayout) -> int:
    """Mmin: the smallest admissible count that the lower bounds do not rule out."""
    bound = martello_toth_bound(items.sizes, items.capacity)
    if items.logit_rows is not None:
        bound = max(bound, martello_toth_bound(items.logit_rows, items.logit_capacity))
    return layout.next_admissible(-(-bound // layout.dp))


def _tight_bins(items: Items, num_bins: int) -> list[list[int]]:
    """The fewest micro-batches that any packing by size alone finds."""
    if items.logit_rows is not None:
        return first_fit_two_caps(items)
    sizes, capacity = items.sizes, items.capacity
    # Large steps come here when they are tight, which is what the exact fit is for.
    packings = [lambda: best_fit_decreasing(sizes, capacity)]
    packings.insert(
        0 if sizes.size > SEARCH_NUM_SAMPLES else 1, lambda: exact_fit(sizes, capacity, num_bins)
    )
    bins = packings[0]()
    if len(bins) > num_bins:
        bins = min(packings[1](), bins, key=len)
    if len(bins) > num_bins and items.sizes.size <= MOST_SAMPLES:
        bins = search_packing(items.sizes, items.capacity, num_bins) or bins
    return bins


def _alone(items: Items, num_rows: int, layout: ParallelLayout) -> Placement:
    """Each sample a micro-batch, the rest of the dp · num_rows are dummies."""
    placement = Placement(items, np.arange(items.sizes.size), layout.dp, num_rows)
    return dealt(placement, layout.dp, row_width(layout))


def _split(items: Items, bins: list[list[int]], num_bins: int) -> NDArray[np.int64]:
    """The micro-batch of each item once the costliest have been split until there are enough."""
    bins = expand_bins_by_splitting(bins, num_bins, items.costs.tolist())
    bin_of = np.empty(items.sizes.size, dtype=np.int64)
    members = np.array(list(chain.from_iterable(bins)), dtype=np.int64)
    bin_of[members] = np.repeat(np.arange(len(bins)), [len(b) for b in bins])
    return bin_of

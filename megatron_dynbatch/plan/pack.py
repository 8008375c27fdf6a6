"""One step: samples into micro-batches, micro-batches onto DP ranks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.binpack import best_fit_decreasing
from megatron_dynbatch.plan.cost import integer_costs
from megatron_dynbatch.plan.layout import ParallelLayout
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.placement import deal_rows
from megatron_dynbatch.plan.simple import expand_bins_by_splitting


def pack_step(
    lengths: NDArray[np.int64], layout: ParallelLayout, options: PlanOptions
) -> list[list[list[int]]]:
    """Micro-batches [dp][M] of the samples of a step, as item numbers into `lengths`.

    Args:
        lengths: Laid-out tokens of each sample [S].
        layout: The parallel layout.
        options: Cap or micro-batch size, and the cost model.
    """
    costs = integer_costs(options.cost.sample_costs(lengths)).tolist()
    capacity = options.capacity(layout)
    if capacity is None:
        assert options.micro_batch_size is not None
        bins, num_microbatches = _static_bins(costs, options.micro_batch_size, layout)
    else:
        bins = best_fit_decreasing(lengths, capacity)
        num_microbatches = layout.next_admissible(-(-len(bins) // layout.dp))
    target = min(layout.dp * num_microbatches, len(costs))
    bins = expand_bins_by_splitting(bins, target, costs)
    bin_costs = [sum(costs[item] for item in items) for items in bins]
    return [
        [sorted(bins[number]) if number >= 0 else [] for number in rank]
        for rank in deal_rows(bin_costs, layout.dp, num_microbatches)
    ]


def _static_bins(
    costs: list[int], micro_batch_size: int, layout: ParallelLayout
) -> tuple[list[list[int]], int]:
    """Samples of similar cost together, `micro_batch_size` or one fewer in each micro-batch."""
    num_samples = len(costs)
    num_microbatches = layout.next_admissible(-(-num_samples // (layout.dp * micro_batch_size)))
    num_bins = min(num_samples, layout.dp * num_microbatches)
    order = sorted(range(num_samples), key=lambda item: (-costs[item], item))
    edges = [num_samples * number // num_bins for number in range(num_bins + 1)]
    bins = [order[edges[number] : edges[number + 1]] for number in range(num_bins)]
    return bins, num_microbatches

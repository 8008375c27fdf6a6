"""In which order a rank runs its micro-batches.

All ranks get the same order of rows, so that k-th micro-batches stay alike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.layout import ParallelLayout
from megatron_dynbatch.plan.step_time import predict

# Pipelines of more passes are not simulated to choose an order.
MOST_PASSES = 4096


def row_order(costs: NDArray[np.int64], layout: ParallelLayout, name: str) -> NDArray[np.int64]:
    """Order of the rows of a placement.

    Args:
        costs: Cost of each micro-batch [M, dp].
        layout: The parallel layout.
        name: `heaviest_first` (the allocator meets its peak at once), `lightest_first`,
            `light_ends` (a pipeline fills and drains on light micro-batches), or `auto`: the
            fastest predicted of these under pipeline parallelism, else `heaviest_first`.

    Returns:
        Row numbers [M].
    """
    if name != "auto":
        return _by_name(costs, name)
    if layout.pp == 1:
        return _by_name(costs, "heaviest_first")
    if 2 * costs.shape[0] * layout.pp * layout.vpp > MOST_PASSES:
        return _by_name(costs, "light_ends")
    orders = [
        _by_name(costs, other) for other in ("light_ends", "heaviest_first", "lightest_first")
    ]
    return min(orders, key=lambda order: predict(costs[order].T, layout).seconds)


def _by_name(costs: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    dearest_first = np.argsort(-costs.max(axis=1), kind="stable")
    if name == "heaviest_first":
        return dearest_first
    if name == "lightest_first":
        return dearest_first[::-1]
    # Light, …, heavy, …, light: every second one on the way up, the others on the way down.
    up = dearest_first[::-1]
    return np.concatenate([up[0::2], up[1::2][::-1]])

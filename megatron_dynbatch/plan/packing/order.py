"""Which placement a step gets, and in which order a rank runs its micro-batches.

All ranks get the same order of rows, so that k-th micro-batches stay alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.packing.problem import Placement
from megatron_dynbatch.plan.step_time import step_ticks

# Pipelines of more passes are not simulated.
MOST_PASSES = 8192
# A larger count must be predicted faster by this share: a micro-batch has costs of its own, which
# few cost models know (their gamma is 0).
WORTH_A_COUNT = 0.005
PIPELINE_ORDERS = ("light_ends", "heaviest_first", "lightest_first")


def fastest(
    finalists: Sequence[Placement], layout: ParallelLayout, order: str, gamma: int
) -> Placement:
    """The placement whose step is predicted fastest, its rows in order; the first if equal.

    Args:
        finalists: Placements of one step, those of smaller counts first.
        layout: The parallel layout.
        order: `heaviest_first` (the allocator meets its peak at once), `lightest_first`,
            `light_ends` (a pipeline fills and drains on light micro-batches), or `auto`: the
            fastest predicted of these under pipeline parallelism, else `heaviest_first`.
        gamma: Fixed cost of a micro-batch, in the unit of the placements' costs.
    """
    names: tuple[str, ...] = (order,)
    if order == "auto":
        names = PIPELINE_ORDERS if layout.pp > 1 else ("heaviest_first",)
    num_passes = 2 * finalists[-1].num_rows * layout.pp * layout.vpp
    is_long = layout.pp > 1 and num_passes > MOST_PASSES
    if is_long or len(finalists) * len(names) == 1:
        return _ordered(finalists[0], row_order(finalists[0].grid, names[0]))
    best: tuple[int, Placement, NDArray[np.int64]] | None = None
    for _, alike in groupby(finalists, key=lambda placement: placement.num_rows):
        choices = [(p, row_order(p.grid, name)) for p in alike for name in names]
        grids = np.stack([p.grid[rows].T for p, rows in choices]) + gamma
        ticks = step_ticks(grids, layout)
        place = int(ticks.argmin())
        if best is None or int(ticks[place]) < best[0] * (1 - WORTH_A_COUNT):
            best = (int(ticks[place]), *choices[place])
    assert best is not None
    return _ordered(*best[1:])


def row_order(costs: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Order [M] of the rows of a placement, whose micro-batches cost this much [M, dp]."""
    dearest_first = np.argsort(-costs.max(axis=1), kind="stable")
    if name == "heaviest_first":
        return dearest_first
    if name == "lightest_first":
        return dearest_first[::-1]
    # Light, …, heavy, …, light: every second one on the way up, the others on the way down.
    up = dearest_first[::-1]
    return np.concatenate([up[0::2], up[1::2][::-1]])


def _ordered(placement: Placement, rows: NDArray[np.int64]) -> Placement:
    numbers = np.arange(placement.costs.size).reshape(placement.num_rows, placement.dp)
    placement.renumber(numbers[rows])
    return placement

"""FLOPs in Megatron's log count the samples' tokens, and no padding.

Seam: ``training.consume_seqlen_stats_in_iteration``, whose counts stock scripts feed with laid-out
lengths, tails included, and own scripts not at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from megatron_dynbatch.hooks.session import session

Stats = tuple[float | None, float | None]


def consuming_lengths(consume: Callable[[], Stats]) -> Callable[[], Stats]:
    """Wrap the function: Σ T and Σ T² over the samples of the step, which the plan knows."""

    @functools.wraps(consume)
    def consume_planned() -> Stats:
        counted = consume()  # also resets Megatron's own counts
        run = session()
        if run is None or run.step is None:
            return counted
        lengths = run.step.plan.index.total_lengths[run.step.step_plan.samples]
        return float(lengths.sum()), float(np.square(lengths, dtype=np.float64).sum())

    return consume_planned

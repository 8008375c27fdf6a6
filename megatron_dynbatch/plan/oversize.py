"""Samples longer than a micro-batch may be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout, most_response_rows, padded_length
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.rollouts.index import SampleIndex


def oversize_rows(
    index: SampleIndex, layout: ParallelLayout, options: PlanOptions
) -> NDArray[np.int64]:
    """Rows that break a cap of a micro-batch all by themselves, ascending."""
    too_big = np.zeros(len(index.total_lengths), dtype=bool)
    capacity = options.capacity(layout)
    if capacity is not None:
        too_big |= padded_length(index.total_lengths, layout) > capacity
    logit_capacity = options.logit_capacity(layout)
    if logit_capacity is not None:
        rows = most_response_rows(index.total_lengths, index.response_lengths, layout)
        too_big |= rows > logit_capacity
    return np.flatnonzero(too_big)


def _describe(index: SampleIndex, rows: NDArray[np.int64]) -> str:
    """The first few of these samples with their lengths and rollout ids."""
    shown = ", ".join(
        f"sample {row} (rollout {int(index.rollout_ids[row])}) has {int(index.total_lengths[row])}"
        for row in rows[:8].tolist()
    )
    return shown + (f", and {rows.size - 8} more" if rows.size > 8 else "")


def reject_oversize(
    index: SampleIndex, rows: NDArray[np.int64], layout: ParallelLayout, options: PlanOptions
) -> None:
    """Raise a `PlanError` that names the caps, these samples and what to do."""
    ways = "drop" if options.fixed_width else "alone or drop"
    logits = options.logit_capacity(layout)
    logit_words = "" if logits is None else f" or {logits} response rows per GPU"
    raise PlanError(
        f"longer than a micro-batch may be ({options.capacity(layout)} tokens{logit_words} as "
        f"laid out over cp={layout.cp}): {_describe(index, rows)}; raise --max-tokens-per-gpu "
        f"(now {options.max_tokens_per_gpu}) or the logit cap, or choose --oversize {ways}"
    )

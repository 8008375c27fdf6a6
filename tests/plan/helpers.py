"""Small builders that the planning tests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.rollouts.index import SampleIndex


def make_index(
    lengths: Sequence[int],
    rollout_ids: Sequence[int] | None = None,
    group_ids: Sequence[int] | None = None,
    mask_sums: Sequence[int] | None = None,
) -> SampleIndex:
    """An index whose responses are whole samples, trained on every token unless told."""
    absent = [-1] * len(lengths)
    values = {
        "total_lengths": lengths,
        "response_lengths": lengths,
        "mask_sums": lengths if mask_sums is None else mask_sums,
        "rollout_ids": absent if rollout_ids is None else rollout_ids,
        "group_ids": absent if group_ids is None else group_ids,
    }
    return SampleIndex(**{name: np.array(value, dtype=np.int64) for name, value in values.items()})


def plan_lengths(
    lengths: Sequence[int], cap: int, layout: ParallelLayout | None = None, **options: object
) -> Plan:
    """A checked plan of samples that are rollouts of their own."""
    plan = make_plan(
        make_index(lengths),
        layout or ParallelLayout(),
        PlanOptions(max_tokens_per_gpu=cap, **options),  # type: ignore[arg-type]
    )
    plan.check()
    return plan


def packed_lengths(plan: Plan, step: int = 0) -> list[list[list[int]]]:
    """Sample lengths of each micro-batch [dp][M], sorted inside a micro-batch."""
    lengths = plan.index.total_lengths.tolist()
    return [
        [sorted(lengths[row] for row in rows) for rows in rank]
        for rank in plan.steps[step].micro_batches
    ]


def flat(ranks: list[list[list[int]]]) -> list[list[int]]:
    """All micro-batches of all ranks, sorted, dummies left out."""
    return sorted(rows for rank in ranks for rows in rank if rows)

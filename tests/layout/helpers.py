"""The golden fixture as samples and plans, and small random batches."""

from collections.abc import Sequence

import numpy as np

from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, StepPlan
from megatron_dynbatch.plan.denominators import loss_denominator, sample_denominators
from megatron_dynbatch.rollouts import Sample, SampleIndex
from tests import golden


def golden_samples(**per_token: Sequence[Sequence[float]]) -> list[Sample]:
    """Token j of sample i is 100·(i+1) + j."""
    return [
        Sample(
            tokens=100 * (i + 1) + np.arange(golden.TOTALS[i]),
            loss_mask=golden.MASKS[i],
            rollout_id=golden.ROLLOUTS[i],
            group_id=golden.GROUPS[i],
            **{name: values[i] for name, values in per_token.items()},
        )
        for i in range(4)
    ]


def index_of(samples: Sequence[Sample]) -> SampleIndex:
    def ids(name: str) -> np.ndarray:
        values = [getattr(s, name) for s in samples]
        return np.array([-1 if v is None else v for v in values], dtype=np.int64)

    return SampleIndex(
        total_lengths=np.array([s.total_length for s in samples], dtype=np.int64),
        response_lengths=np.array([s.response_length for s in samples], dtype=np.int64),
        mask_sums=np.array([s.mask_sum for s in samples], dtype=np.int64),
        rollout_ids=ids("rollout_id"),
        group_ids=ids("group_id"),
    )


def plan_of(
    samples: Sequence[Sample],
    micro_batches: Sequence[Sequence[Sequence[int]]],
    layout: ParallelLayout | None = None,
    reduction: str = "rollout",
    constant: float | None = None,
) -> Plan:
    """A plan of one step with exactly these micro-batches [dp][M]."""
    index = index_of(samples)
    options = PlanOptions(max_tokens_per_gpu=4096, loss_reduction=reduction, loss_constant=constant)
    rows = np.array([r for rank in micro_batches for mb in rank for r in mb], dtype=np.int64)
    step = StepPlan(
        micro_batches=tuple(tuple(tuple(mb) for mb in rank) for rank in micro_batches),
        step_global_batch_size=len(np.unique(index.rollout_indices[rows])),
        loss_denominator=loss_denominator(index, rows, options),
        num_trained_tokens=int(index.mask_sums[rows].sum()),
    )
    return Plan(
        layout=layout or ParallelLayout(dp=len(micro_batches)),
        options=options,
        index=index,
        steps=(step,),
        sample_denoms=sample_denominators(index, rows, options),
    )

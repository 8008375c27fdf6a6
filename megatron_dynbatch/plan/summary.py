"""Figures of a plan, step by step, each beside the bound that nothing can beat."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry import most_response_rows, padded_length
from megatron_dynbatch.plan.cost import integer_costs
from megatron_dynbatch.plan.packing.bounds import makespan_bound, martello_toth_bound
from megatron_dynbatch.plan.step_plan import StepPlan
from megatron_dynbatch.plan.step_time import predict
from megatron_dynbatch.plan.types import Plan


@dataclass(frozen=True)
class StepSummary:
    """What one step of a plan amounts to.

    Attributes:
        step: Number of the step in the plan.
        num_rollouts: G.
        num_samples: S.
        num_tokens: Tokens as laid out.
        num_microbatches: M, per DP rank.
        fewest_microbatches: The smallest M that the lower bound and the schedule allow.
        fill: Laid-out tokens over the room of all micro-batches; 0 on the static path.
        balance: Most loaded rank over `bounds.makespan_bound`.
        lockstep: Σ_k of the dearest k-th micro-batch, over Σ cost / dp.
        num_dummies: Dummy micro-batches.
        num_oversize: Samples longer than a micro-batch may be.
        seconds: Predicted step time, in the unit of the cost model.
        bubble: Predicted share of time in which ranks wait.
    """

    step: int
    num_rollouts: int
    num_samples: int
    num_tokens: int
    num_microbatches: int
    fewest_microbatches: int
    fill: float
    balance: float
    lockstep: float
    num_dummies: int
    num_oversize: int
    seconds: float
    bubble: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def summarize(plan: Plan) -> list[StepSummary]:
    """Figures of every step of a plan."""
    return [_summarize_step(plan, number, step) for number, step in enumerate(plan.steps)]


def micro_batch_costs(plan: Plan, step: StepPlan) -> NDArray[np.float64]:
    """Cost of each micro-batch [dp, M] by the plan's cost model, its gamma included."""
    lengths = padded_length(plan.index.total_lengths, plan.layout)
    return _sums(step, plan.options.cost.sample_costs(lengths)) + plan.options.cost.gamma


def _sums(step: StepPlan, values: NDArray[Any]) -> NDArray[Any]:
    """Σ over the samples of each micro-batch [dp, M]."""
    listed = values.tolist()
    return np.array(
        [[sum([listed[row] for row in rows]) for rows in rank] for rank in step.micro_batches]
    )


def _summarize_step(plan: Plan, number: int, step: StepPlan) -> StepSummary:
    layout, rows = plan.layout, step.samples
    lengths = padded_length(plan.index.total_lengths, layout)
    integers = np.zeros(lengths.size, dtype=np.int64)
    integers[rows] = integer_costs(plan.options.cost.sample_costs(lengths[rows]))
    grid = _sums(step, integers)
    total = int(integers.sum())
    time = predict(micro_batch_costs(plan, step), layout)
    capacity = plan.options.capacity(layout)
    least = 1 if step.num_dummies else step.num_microbatches
    room = 0 if capacity is None else capacity * layout.dp * step.num_microbatches
    return StepSummary(
        step=number,
        num_rollouts=step.step_global_batch_size,
        num_samples=step.num_samples,
        num_tokens=int(lengths[rows].sum()),
        num_microbatches=step.num_microbatches,
        fewest_microbatches=fewest_microbatches(plan, rows),
        fill=int(lengths[rows].sum()) / room if room else 0.0,
        balance=int(grid.sum(axis=1).max()) / makespan_bound(integers[rows], layout.dp, least),
        lockstep=int(grid.max(axis=0).sum()) * layout.dp / total,
        num_dummies=step.num_dummies,
        num_oversize=int(np.isin(rows, plan.oversize).sum()),
        seconds=time.seconds,
        bubble=time.bubble,
    )


def fewest_microbatches(plan: Plan, rows: NDArray[np.int64]) -> int:
    """The smallest admissible M that no lower bound rules out for these samples."""
    layout, options, index = plan.layout, plan.options, plan.index
    if options.micro_batch_size is not None:
        return layout.next_admissible(-(-rows.size // (layout.dp * options.micro_batch_size)))
    capacity = options.capacity(layout)
    assert capacity is not None
    bound = martello_toth_bound(padded_length(index.total_lengths[rows], layout), capacity)
    logit_capacity = options.logit_capacity(layout)
    if logit_capacity is not None:
        logits = most_response_rows(index.total_lengths[rows], index.response_lengths[rows], layout)
        bound = max(bound, martello_toth_bound(logits, logit_capacity))
    return layout.next_admissible(-(-bound // layout.dp))

"""`make_plan`: a batch's lengths and ids to a plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout, most_response_rows, padded_length
from megatron_dynbatch.plan.denominators import sample_denominators
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.oversize import oversize_rows, reject_oversize
from megatron_dynbatch.plan.packing.pack import pack_step
from megatron_dynbatch.plan.splitters import split_steps
from megatron_dynbatch.plan.step_plan import StepPlan, make_step
from megatron_dynbatch.plan.types import Plan
from megatron_dynbatch.rollouts.index import SampleIndex

MAX_MICRO_BATCHES = 1 << 24
"""Steps of a plan times its data-parallel ranks; each has a micro-batch at least."""


def make_plan(
    index: SampleIndex, layout: ParallelLayout, options: PlanOptions, last: bool = False
) -> Plan:
    """Plan a batch: rollouts into steps, samples into micro-batches, micro-batches onto ranks.

    Args:
        index: Lengths, mask sums and ids of the samples: carried ones first.
        layout: The parallel layout of the training job.
        options: Caps, steps, reduction and policies.
        last: Nothing follows this batch, so the leftover policy `carry` keeps nothing.

    Returns:
        A plan that keeps every guarantee of `Plan.check`.

    Raises:
        RolloutDataError: The batch is empty, or a length, mask sum or id is out of range.
        PlanError: A sample is longer than a micro-batch may be (`oversize="error"`), or a step
            cannot be made as asked.
    """
    index.check("batch to plan")
    steps_options = options.without_carry() if last else options
    oversize = oversize_rows(index, layout, options)
    if oversize.size and options.oversize == "error":
        reject_oversize(index, oversize, layout, options)
    is_kept = np.ones(len(index), dtype=bool)
    if options.oversize == "drop":
        is_kept[oversize] = False
    steps: list[StepPlan] = []
    step_rows = list(_step_rows(index, np.flatnonzero(is_kept), steps_options))
    if len(step_rows) * layout.dp > MAX_MICRO_BATCHES:
        raise PlanError(
            f"{len(step_rows)} steps on dp={layout.dp} ranks have more than {MAX_MICRO_BATCHES} "
            "micro-batches; take more rollouts per step, or divide the batch"
        )
    is_planned = np.zeros(len(index), dtype=bool)
    for rows, num_rollouts in step_rows:
        steps.append(_plan_step(index, rows, num_rollouts, layout, options))
        is_planned[rows] = True
    is_carried = is_kept & ~is_planned & (steps_options.leftover == "carry")
    return Plan(
        layout=layout,
        options=options,
        index=index,
        steps=tuple(steps),
        sample_denoms=sample_denominators(index, np.flatnonzero(is_planned), options),
        carried=tuple(np.flatnonzero(is_carried).tolist()),
        dropped=tuple(np.flatnonzero(~is_planned & ~is_carried).tolist()),
        oversize=tuple(oversize.tolist()),
    )


def _step_rows(
    index: SampleIndex, kept: NDArray[np.int64], options: PlanOptions
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Sample rows of each step, ascending, and the number of rollouts that they are."""
    if not kept.size:
        return
    kept_index = index if kept.size == len(index) else index.take(kept)
    rollout_of = kept_index.rollout_indices
    by_rollout = np.argsort(rollout_of, kind="stable")
    ends = np.cumsum(np.bincount(rollout_of))
    for rollouts in split_steps(kept_index, options):
        if rollouts.size == kept_index.num_rollouts:
            yield kept, int(rollouts.size)
            continue
        pieces = [by_rollout[ends[i - 1] if i else 0 : ends[i]] for i in rollouts.tolist()]
        yield np.sort(kept[np.concatenate(pieces)]), int(rollouts.size)


def _plan_step(
    index: SampleIndex,
    rows: NDArray[np.int64],
    num_rollouts: int,
    layout: ParallelLayout,
    options: PlanOptions,
) -> StepPlan:
    lengths = padded_length(index.total_lengths[rows], layout)
    logit_rows = None
    if options.max_logits_per_gpu is not None:
        logit_rows = most_response_rows(
            index.total_lengths[rows], index.response_lengths[rows], layout
        )
    micro_batches = pack_step(lengths, logit_rows, layout, options).micro_batches(rows)
    return make_step(micro_batches, num_rollouts, index, options)

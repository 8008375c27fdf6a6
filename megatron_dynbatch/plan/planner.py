"""`make_plan`: a batch's lengths and ids to a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.denominators import loss_denominator, sample_denominators
from megatron_dynbatch.plan.errors import PlanError
from megatron_dynbatch.plan.layout import ParallelLayout, padded_length, response_rows
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.pack import pack_step
from megatron_dynbatch.plan.splitters import split_steps
from megatron_dynbatch.plan.types import Plan, StepPlan
from megatron_dynbatch.rollouts.index import SampleIndex


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
        _reject_oversize(index, oversize, layout, options)
    kept = np.arange(len(index.total_lengths))
    if options.oversize == "drop":
        kept = np.setdiff1d(kept, oversize)
    kept_index = index.take(kept)
    steps: list[StepPlan] = []
    planned: list[NDArray[np.int64]] = []
    if kept.size:
        order = np.argsort(kept_index.rollout_indices, kind="stable")
        starts = np.searchsorted(
            kept_index.rollout_indices[order], np.arange(kept_index.num_rollouts + 1)
        )
        for rollouts in split_steps(kept_index, steps_options):
            pieces = [order[starts[rollout] : starts[rollout + 1]] for rollout in rollouts]
            rows = np.sort(kept[np.concatenate(pieces)])
            steps.append(_plan_step(index, rows, len(rollouts), layout, options))
            planned.append(rows)
    rows = np.sort(np.concatenate(planned)) if planned else np.zeros(0, dtype=np.int64)
    left_over = np.setdiff1d(kept, rows)
    carries = steps_options.leftover == "carry"
    gone = np.setdiff1d(np.arange(len(index.total_lengths)), kept)
    dropped = gone if carries else np.sort(np.concatenate([gone, left_over]))
    return Plan(
        layout=layout,
        options=options,
        index=index,
        steps=tuple(steps),
        sample_denoms=sample_denominators(index, rows, options),
        carried=tuple(left_over.tolist()) if carries else (),
        dropped=tuple(dropped.tolist()),
        oversize=tuple(oversize.tolist()),
    )


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
        logit_rows = response_rows(index.total_lengths[rows], index.response_lengths[rows], layout)
    numbers = rows.tolist()
    ranks = pack_step(lengths, logit_rows, layout, options).micro_batches()
    return StepPlan(
        micro_batches=tuple(
            tuple(tuple([numbers[item] for item in items]) for items in rank) for rank in ranks
        ),
        step_global_batch_size=num_rollouts,
        loss_denominator=loss_denominator(index, rows, options),
        num_trained_tokens=int(index.mask_sums[rows].sum()),
    )


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
        rows = response_rows(index.total_lengths, index.response_lengths, layout)
        too_big |= rows > logit_capacity
    return np.flatnonzero(too_big)


def _describe(index: SampleIndex, rows: NDArray[np.int64]) -> str:
    """The first few of these samples with their lengths and rollout ids."""
    shown = ", ".join(
        f"sample {row} (rollout {int(index.rollout_ids[row])}) has {int(index.total_lengths[row])}"
        for row in rows[:8].tolist()
    )
    return shown + (f", and {rows.size - 8} more" if rows.size > 8 else "")


def _reject_oversize(
    index: SampleIndex, rows: NDArray[np.int64], layout: ParallelLayout, options: PlanOptions
) -> None:
    ways = "'drop'" if options.fixed_width else "'alone' or 'drop'"
    logits = options.logit_capacity(layout)
    logit_words = "" if logits is None else f" or {logits} response rows per GPU"
    raise PlanError(
        f"longer than a micro-batch may be ({options.capacity(layout)} tokens{logit_words} as "
        f"laid out over cp={layout.cp}): {_describe(index, rows)}; raise max_tokens_per_gpu "
        f"({options.max_tokens_per_gpu}) or the logit cap, or choose oversize {ways}"
    )

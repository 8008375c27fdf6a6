"""The list form of a plan, for trainers that hold schedules in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron_dynbatch.plan.denominators import loss_denominator, sample_denominators
from megatron_dynbatch.plan.errors import PlanError
from megatron_dynbatch.plan.layout import ParallelLayout
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.planner import make_plan, oversize_rows
from megatron_dynbatch.plan.types import Plan, StepPlan
from megatron_dynbatch.rollouts.checked_paths import short
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.wording import counted


class Schedule(NamedTuple):
    """A plan as lists.

    Attributes:
        partitions: [dp] sample rows of each DP rank, in the order in which it runs them.
        micro_batch_indices: [dp] lists of local indices, flat over steps; they tile
            range(len(partitions[r])) in order; a dummy is an empty list.
        num_microbatches: [steps] micro-batches per rank, dummies included.
        global_batch_sizes: [steps] rollouts.
    """

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]


def build_dp_schedule(
    total_lengths: Sequence[int],
    *,
    rollout_indices: Sequence[int | None] | None = None,
    global_batch_size: int | None = None,
    layout: ParallelLayout | None = None,
    options: PlanOptions,
) -> Schedule:
    """Plan a batch that is known by its lengths only.

    Args:
        total_lengths: Tokens of each sample [S].
        rollout_indices: Rollout of each sample [S]; None (the whole list, or an entry) makes a
            sample a rollout of its own.
        global_batch_size: Rollouts per step; None keeps `options.rollouts_per_step`.
        layout: The parallel layout; None is a single rank.
        options: Caps and policies; the loss reduction does not matter here.

    Raises:
        PlanError: As `make_plan`; also lists of different lengths.
    """
    num_samples = len(total_lengths)
    if rollout_indices is None:
        rollout_indices = [None] * num_samples
    if len(rollout_indices) != num_samples:
        raise PlanError(
            f"{num_samples} total_lengths but {len(rollout_indices)} rollout_indices: every "
            "sample needs one of each"
        )
    lengths = np.asarray(total_lengths)
    index = SampleIndex(
        total_lengths=lengths,
        response_lengths=lengths,
        mask_sums=lengths,
        rollout_ids=np.array([-1 if i is None else i for i in rollout_indices]),
        group_ids=np.full(num_samples, -1, dtype=np.int64),
    )
    if global_batch_size is not None:
        options = replace(options, rollouts_per_step=global_batch_size)
    return plan_to_schedule(make_plan(index, layout or ParallelLayout(), options))


def plan_to_schedule(plan: Plan) -> Schedule:
    """The list form of a plan."""
    partitions: list[list[int]] = [[] for _ in range(plan.layout.dp)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(plan.layout.dp)]
    for step in plan.steps:
        for rank, micro_batches in enumerate(step.micro_batches):
            for rows in micro_batches:
                start = len(partitions[rank])
                partitions[rank].extend(rows)
                micro_batch_indices[rank].append(list(range(start, start + len(rows))))
    return Schedule(
        partitions,
        micro_batch_indices,
        [step.num_microbatches for step in plan.steps],
        [step.step_global_batch_size for step in plan.steps],
    )


def plan_from_schedule(
    schedule: Schedule, index: SampleIndex, layout: ParallelLayout, options: PlanOptions
) -> Plan:
    """The plan that a list form describes, checked.

    Args:
        schedule: The list form; samples in no partition are carried under `leftover="carry"`
            (oversize ones never), else dropped.
        index: Lengths, mask sums and ids of all samples.
        layout: The parallel layout; dp must be the number of partitions.
        options: The options of the plan.

    Raises:
        PlanError: The lists do not fit together, or the plan breaks a guarantee.
    """
    index.check("batch of the schedule")
    _check_types(schedule, len(index))
    _check_schedule(Schedule(*schedule), layout)
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = schedule
    steps: list[StepPlan] = []
    start = 0
    for count, num_rollouts in zip(num_microbatches, global_batch_sizes, strict=True):
        micro_batches = tuple(
            tuple(
                tuple(partition[local] for local in indices)
                for indices in rank_indices[start : start + count]
            )
            for partition, rank_indices in zip(partitions, micro_batch_indices, strict=True)
        )
        start += count
        rows = np.array([row for rank in micro_batches for mb in rank for row in mb], np.int64)
        steps.append(
            StepPlan(
                micro_batches=micro_batches,
                step_global_batch_size=num_rollouts,
                loss_denominator=loss_denominator(index, rows, options),
                num_trained_tokens=int(index.mask_sums[rows].sum()),
            )
        )
    planned = np.array([row for partition in partitions for row in partition], dtype=np.int64)
    missing = np.setdiff1d(np.arange(len(index.total_lengths)), planned)
    oversize = oversize_rows(index, layout, options)
    dropped = missing
    if options.leftover == "carry":
        dropped = np.intersect1d(missing, oversize) if options.oversize == "drop" else missing[:0]
    plan = Plan(
        layout=layout,
        options=options,
        index=index,
        steps=tuple(steps),
        sample_denoms=sample_denominators(index, planned, options),
        carried=tuple(np.setdiff1d(missing, dropped).tolist()),
        dropped=tuple(dropped.tolist()),
        oversize=tuple(oversize.tolist()),
    )
    plan.check()
    return plan


def _check_types(schedule: Schedule, num_samples: int) -> None:
    """Four lists of (lists of…) integers that can be rows and counts."""
    if not isinstance(schedule, (list, tuple)) or len(schedule) != 4:
        raise PlanError(f"schedule: four lists are expected, not {short(schedule)}")
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = schedule
    _check_ints("partitions", partitions, 2, num_samples)
    _check_ints("micro_batch_indices", micro_batch_indices, 3, num_samples)
    _check_ints("num_microbatches", num_microbatches, 1, 1 << 40)
    _check_ints("global_batch_sizes", global_batch_sizes, 1, num_samples + 1)


def _check_ints(name: str, values: object, depth: int, end: int) -> None:
    """Lists in lists, so deep, of integers below an end."""
    if depth == 0:
        if type(values) is not int or not 0 <= values < end:
            raise PlanError(
                f"schedule: {name} has {short(values)}; give integers from 0 to {end - 1}"
            )
    elif not isinstance(values, (list, tuple)):
        raise PlanError(f"schedule: {name} has {short(values)}; give lists of integers")
    else:
        for value in values:
            _check_ints(name, value, depth - 1, end)


def _check_schedule(schedule: Schedule, layout: ParallelLayout) -> None:
    """The four lists fit together."""
    if not len(schedule.partitions) == len(schedule.micro_batch_indices) == layout.dp:
        raise PlanError(
            f"schedule: {len(schedule.partitions)} partitions and "
            f"{len(schedule.micro_batch_indices)} micro_batch_indices for dp={layout.dp}"
        )
    if len(schedule.num_microbatches) != len(schedule.global_batch_sizes):
        raise PlanError(
            f"schedule: {len(schedule.num_microbatches)} num_microbatches but "
            f"{len(schedule.global_batch_sizes)} global_batch_sizes"
        )
    total = sum(schedule.num_microbatches)
    for rank, indices in enumerate(schedule.micro_batch_indices):
        if len(indices) != total:
            raise PlanError(
                f"schedule: DP rank {rank} has {counted(len(indices), 'micro-batch')}, "
                f"num_microbatches add up to {total}"
            )
        tiled = [local for mb in indices for local in mb]
        if tiled != list(range(len(schedule.partitions[rank]))):
            raise PlanError(
                f"schedule: micro_batch_indices of DP rank {rank} do not tile "
                f"range({len(schedule.partitions[rank])}) in order"
            )

"""The list form of a plan, and the way back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.denominators import sample_denominators
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.oversize import oversize_rows
from megatron_dynbatch.plan.plan_data import PlanData
from megatron_dynbatch.plan.step_plan import StepPlan, make_step
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.wording import counted, short


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


def plan_to_schedule(plan: PlanData) -> Schedule:
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


def data_from_schedule(
    schedule: Schedule, index: SampleIndex, layout: ParallelLayout, options: PlanOptions
) -> PlanData:
    """What a list form says, as `Plan.from_schedule` has it, guarantees unchecked.

    Raises:
        PlanError: The lists do not fit together.
    """
    index.check("batch of the schedule")
    _check_types(schedule, len(index))
    _check_schedule(Schedule(*schedule), layout)
    partitions, micro_batch_indices, num_microbatches, global_batch_sizes = schedule
    steps: list[StepPlan] = []
    start = 0
    for count, num_rollouts in zip(num_microbatches, global_batch_sizes, strict=True):
        micro_batches = [
            [
                [partition[local] for local in indices]
                for indices in rank_indices[start : start + count]
            ]
            for partition, rank_indices in zip(partitions, micro_batch_indices, strict=True)
        ]
        start += count
        steps.append(make_step(micro_batches, num_rollouts, index, options))
    planned = np.array([row for partition in partitions for row in partition], dtype=np.int64)
    missing = np.setdiff1d(np.arange(len(index.total_lengths)), planned)
    oversize = oversize_rows(index, layout, options)
    dropped = missing
    if options.leftover == "carry":
        dropped = np.intersect1d(missing, oversize) if options.oversize == "drop" else missing[:0]
    return PlanData(
        layout=layout,
        options=options,
        index=index,
        steps=tuple(steps),
        sample_denoms=sample_denominators(index, planned, options),
        carried=tuple(np.setdiff1d(missing, dropped).tolist()),
        dropped=tuple(dropped.tolist()),
        oversize=tuple(oversize.tolist()),
    )


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

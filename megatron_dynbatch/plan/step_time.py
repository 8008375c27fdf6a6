"""Predicted time of a step: pipeline schedules with unequal micro-batches, lock-step, barrier.

The model is a discrete-event one. A pipeline stage runs its forward and backward passes in the
order of Megatron's schedule (`stage_order`); a pass starts when the one before it on the stage
has ended and its input is there: the same micro-batch's forward on the stage before, or its
backward on the stage after. Expert parallelism makes the k-th micro-batches of the ranks in one
group take as long as their dearest. The step ends when the slowest DP rank has ended.

Times are in the unit of the cost model. Stages share a micro-batch's cost equally, a third of it
forward and two thirds backward; transfers take no time. Inside, time is counted in ticks, of which
a forward pass takes as many as its micro-batch costs: integer costs are simulated exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry import ParallelLayout


class Pass(NamedTuple):
    """One forward or backward pass of a micro-batch through one model chunk of a stage."""

    is_forward: bool
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class StepTime:
    """What the model predicts for a step.

    Attributes:
        seconds: Duration, in the unit of the costs (seconds, if the cost model is measured).
        bubble: Share of the ranks' time in which they wait, 0 to 1.
    """

    seconds: float
    bubble: float


# (stage, pass, place in the program of the pass that its input comes from, or −1).
Program = tuple[tuple[int, Pass, int], ...]


@lru_cache(maxsize=64)
def stage_order(stage: int, num_microbatches: int, layout: ParallelLayout) -> tuple[Pass, ...]:
    """Passes of a pipeline stage, in the order of Megatron's 1F1B or interleaved schedule.

    Source: `forward_backward_pipelining_without_interleaving` and `..._with_interleaving` of
    megatron-core 0.19 (warm-up, one forward and one backward in turn, cool-down).
    """
    pp, vpp, group = layout.pp, layout.vpp, layout.group
    if vpp == 1:
        forwards = [(k, 0) for k in range(num_microbatches)]
        warm_up = pp - stage - 1
    else:
        forwards = [
            (k, chunk)
            for start in range(0, num_microbatches, group)
            for chunk in range(vpp)
            for k in range(start, min(start + group, num_microbatches))
        ]
        warm_up = (pp - stage - 1) * 2 + (vpp - 1) * group
    warm_up = min(warm_up, len(forwards))
    order = [Pass(True, *forwards[i]) for i in range(warm_up)]
    for i, (k, chunk) in enumerate(forwards):
        if warm_up + i < len(forwards):
            order.append(Pass(True, *forwards[warm_up + i]))
        order.append(Pass(False, k, vpp - 1 - chunk))
    return tuple(order)


def predict(costs: NDArray[Any], layout: ParallelLayout) -> StepTime:
    """Time and bubble of a step.

    Args:
        costs: Cost of each micro-batch [dp, M], in the order in which ranks run them; what the
            cost model says, its gamma included.
        layout: The parallel layout.
    """
    durations = np.asarray(costs, dtype=np.float64)
    busy = float(durations.sum()) / durations.shape[0]
    seconds = float(step_ticks(durations[None], layout)[0]) / ticks_per_cost(layout)
    # Every stage works for 1/pp of the cost.
    bubble = 1 - busy / layout.pp / seconds if seconds > 0 else 0.0
    return StepTime(seconds, max(0.0, bubble))


def ticks_per_cost(layout: ParallelLayout) -> int:
    """Ticks in a unit of cost: one forward pass of a micro-batch of cost c takes c ticks."""
    return 3 * layout.pp * layout.vpp


def step_ticks[T: (np.int64, np.float64)](costs: NDArray[T], layout: ParallelLayout) -> NDArray[T]:
    """Durations of several steps side by side, in ticks; exact for integer costs.

    Args:
        costs: Cost of each micro-batch [steps, dp, M], in the order in which ranks run them.
        layout: The parallel layout.

    Returns:
        Durations [steps], of the type of the costs.
    """
    durations = in_lockstep(costs, layout.lockstep_ranks)
    if layout.pp == 1:
        ends = 3 * durations.sum(axis=2)
    else:
        ends = pipeline_ticks(durations.reshape(-1, durations.shape[2]), layout)
    return ends.reshape(len(costs), -1).max(axis=1)


def in_lockstep[T: (np.int64, np.float64)](durations: NDArray[T], size: int) -> NDArray[T]:
    """Micro-batches [steps, groups, M] of groups of `size` consecutive ranks [steps, dp, M].

    A group takes as long as its slowest rank, micro-batch by micro-batch.
    """
    if size == 1:
        return durations
    return np.maximum.reduceat(durations, np.arange(0, durations.shape[1], size), axis=1)


def pipeline_ticks[T: (np.int64, np.float64)](
    durations: NDArray[T], layout: ParallelLayout
) -> NDArray[T]:
    """When each of several independent pipelines has finished.

    Args:
        durations: Cost of each micro-batch [pipelines, M], over all stages and chunks.
        layout: The parallel layout.

    Returns:
        Ends [pipelines], in ticks.
    """
    _, ends, _ = _run(durations, layout)
    return np.maximum.reduce(ends)


PassKey = tuple[int, Pass]
Times = dict[PassKey, NDArray[np.float64]]


def pass_times(durations: NDArray[np.float64], layout: ParallelLayout) -> tuple[Times, Times]:
    """Start and end [pipelines] of every pass, by (stage, pass), in the unit of the costs."""
    starts, ends, program = _run(durations, layout)
    ticks = ticks_per_cost(layout)
    keys = [(stage, item) for stage, item, _ in program]
    return (
        {key: start / ticks for key, start in zip(keys, starts, strict=True)},
        {key: end / ticks for key, end in zip(keys, ends, strict=True)},
    )


def _run[T: (np.int64, np.float64)](
    durations: NDArray[T], layout: ParallelLayout
) -> tuple[list[NDArray[T]], list[NDArray[T]], Program]:
    """Starts and ends [pipelines] of the passes of a program, in ticks."""
    program = _program(durations.shape[1], replace(layout, dp=1, cp=1, tp=1, ep=1))
    forward = np.ascontiguousarray(durations.T)
    backward = 2 * forward
    clocks = [np.zeros_like(forward[0]) for _ in range(layout.pp)]
    starts: list[NDArray[T]] = []
    ends: list[NDArray[T]] = []
    for stage, item, source in program:
        start = clocks[stage]
        if source >= 0:
            start = np.maximum(start, ends[source])
        length = forward if item.is_forward else backward
        clocks[stage] = start + length[item.micro_batch]
        starts.append(start)
        ends.append(clocks[stage])
    return starts, ends, program


@lru_cache(maxsize=64)
def _program(num_microbatches: int, layout: ParallelLayout) -> Program:
    """Passes of all stages, each behind the one that its input comes from: its place, or −1."""
    orders = [stage_order(stage, num_microbatches, layout) for stage in range(layout.pp)]
    places: dict[PassKey, int] = {}
    program: list[tuple[int, Pass, int]] = []
    done = [0] * layout.pp
    total = sum(len(order) for order in orders)
    while len(program) < total:
        before = len(program)
        for stage in range(layout.pp):
            while done[stage] < len(orders[stage]):
                item = orders[stage][done[stage]]
                source = _source(stage, item, layout)
                if source is not None and source not in places:
                    break
                places[stage, item] = len(program)
                program.append((stage, item, -1 if source is None else places[source]))
                done[stage] += 1
        assert len(program) > before, "the schedule waits for itself"
    return tuple(program)


def _source(stage: int, item: Pass, layout: ParallelLayout) -> PassKey | None:
    """The pass that this one gets its input from."""
    last_stage, last_chunk = layout.pp - 1, layout.vpp - 1
    if item.is_forward:
        if stage > 0:
            return stage - 1, item
        if item.chunk > 0:
            return last_stage, Pass(True, item.micro_batch, item.chunk - 1)
        return None
    if stage < last_stage:
        return stage + 1, item
    if item.chunk < last_chunk:
        return 0, Pass(False, item.micro_batch, item.chunk + 1)
    return stage, Pass(True, item.micro_batch, item.chunk)

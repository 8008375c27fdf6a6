"""Predicted time of a step: pipeline schedules with unequal micro-batches, lock-step, barrier.

The model is a discrete-event one. A pipeline stage runs its forward and backward passes in the
order of Megatron's schedule (`stage_order`); a pass starts when the one before it on the stage
has ended and its input is there: the same micro-batch's forward on the stage before, or its
backward on the stage after. Expert parallelism makes the k-th micro-batches of the ranks in one
group take as long as their dearest. The step ends when the slowest DP rank has ended.

Times are in the unit of the cost model. Stages share a micro-batch's cost equally, a third of it
forward and two thirds backward; transfers take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.layout import ParallelLayout

FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Pass:
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
    durations = _in_lockstep(durations, layout.lockstep_ranks)
    if layout.pp == 1:
        seconds = float(durations.sum(axis=1).max())
    else:
        seconds = float(pipeline_ends(durations, layout).max())
    # Every stage works for 1/pp of the cost.
    bubble = 1 - busy / layout.pp / seconds if seconds > 0 else 0.0
    return StepTime(seconds, max(0.0, bubble))


def _in_lockstep(durations: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Each group of `size` consecutive ranks takes as long as its slowest, micro-batch-wise."""
    if size == 1:
        return durations
    groups = [durations[start : start + size] for start in range(0, len(durations), size)]
    return np.stack([group.max(axis=0) for group in groups])


def pipeline_ends(durations: NDArray[np.float64], layout: ParallelLayout) -> NDArray[np.float64]:
    """When each of several independent pipelines has finished.

    Args:
        durations: Cost of each micro-batch [pipelines, M], over all stages and chunks.
        layout: The parallel layout.

    Returns:
        Ends [pipelines].
    """
    return np.maximum.reduce(list(pass_times(durations, layout)[1].values()))


PassKey = tuple[int, Pass]
Times = dict[PassKey, NDArray[np.float64]]


def pass_times(durations: NDArray[np.float64], layout: ParallelLayout) -> tuple[Times, Times]:
    """Start and end [pipelines] of every pass, by (stage, pass)."""
    pp, vpp = layout.pp, layout.vpp
    num_microbatches = durations.shape[1]
    orders = [stage_order(stage, num_microbatches, layout) for stage in range(pp)]
    share = {True: FORWARD_SHARE / (pp * vpp), False: (1 - FORWARD_SHARE) / (pp * vpp)}
    starts: Times = {}
    ends: Times = {}
    clocks = [np.zeros(durations.shape[0]) for _ in range(pp)]
    done = [0] * pp
    remaining = sum(len(order) for order in orders)
    while remaining:
        before = remaining
        for stage in range(pp):
            while done[stage] < len(orders[stage]):
                item = orders[stage][done[stage]]
                source = _source(stage, item, layout)
                if source is not None and source not in ends:
                    break
                ready = clocks[stage] if source is None else np.maximum(clocks[stage], ends[source])
                starts[stage, item] = ready
                clocks[stage] = ready + share[item.is_forward] * durations[:, item.micro_batch]
                ends[stage, item] = clocks[stage]
                done[stage] += 1
                remaining -= 1
        assert remaining < before, "the schedule waits for itself"
    return starts, ends


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

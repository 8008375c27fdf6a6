"""The step-time model against a brute-force event simulator and closed forms."""

from __future__ import annotations

import heapq
from collections import defaultdict
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.plan import ParallelLayout
from megatron_dynbatch.plan.step_time import Pass, pass_times, predict, stage_order


def simulate(durations: list[int], layout: ParallelLayout) -> Fraction:
    """One pipeline, event by event: a stage looks at its queue whenever anything has ended."""
    pp, vpp = layout.pp, layout.vpp
    queues = {s: list(stage_order(s, len(durations), layout)) for s in range(pp)}
    ended: set[tuple[int, Pass]] = set()
    busy: set[int] = set()
    events: list[tuple[Fraction, int, int]] = []
    running: dict[int, Pass] = {}
    now = Fraction(0)

    def input_is_there(stage: int, item: Pass) -> bool:
        # Chunks of all stages in the order in which the model runs them.
        place = item.chunk * pp + stage
        if item.is_forward:
            before = place - 1
            if before < 0:
                return True
            source = (before % pp, Pass(True, item.micro_batch, before // pp))
        else:
            after = place + 1
            if after == pp * vpp:
                source = (stage, Pass(True, item.micro_batch, item.chunk))
            else:
                source = (after % pp, Pass(False, item.micro_batch, after // pp))
        return source in ended

    while any(queues.values()) or running:
        for stage in range(pp):
            if stage not in busy and queues[stage] and input_is_there(stage, queues[stage][0]):
                item = queues[stage].pop(0)
                share = Fraction(1 if item.is_forward else 2, 3 * pp * vpp)
                busy.add(stage)
                running[stage] = item
                heapq.heappush(events, (now + share * durations[item.micro_batch], stage, 0))
        now, stage, _ = heapq.heappop(events)
        busy.discard(stage)
        ended.add((stage, running.pop(stage)))
    return now


LAYOUTS = [
    ParallelLayout(pp=2),
    ParallelLayout(pp=4),
    ParallelLayout(pp=2, vpp=2),
    ParallelLayout(pp=3, vpp=2, vpp_group=4),
    ParallelLayout(pp=2, vpp=3, vpp_group=3),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_pipelines_end_when_the_event_simulator_says(
    layout: ParallelLayout, data: st.DataObject
) -> None:
    count = layout.next_admissible(data.draw(st.integers(1, 8)))
    draw = st.lists(st.integers(1, 100), min_size=count, max_size=count)
    ranks = data.draw(st.lists(draw, min_size=1, max_size=3))
    # Ranks of one pipeline group each: the barrier waits for the slowest.
    wide = ParallelLayout(dp=len(ranks), pp=layout.pp, vpp=layout.vpp, vpp_group=layout.vpp_group)
    expected = max(simulate(durations, layout) for durations in ranks)
    assert predict(np.array(ranks), wide).seconds == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("count", [8, 20])
def test_equal_micro_batches_have_the_known_bubble(pp: int, count: int) -> None:
    # Narayanan et al. 2021: 1F1B idles for (pp − 1) of (count + pp − 1) slots.
    result = predict(np.full((1, count), 12), ParallelLayout(pp=pp))
    assert result.seconds == pytest.approx(12 / pp * (count + pp - 1))
    assert result.bubble == pytest.approx((pp - 1) / (count + pp - 1))


@pytest.mark.parametrize("vpp", [2, 4])
def test_interleaving_divides_the_bubble(vpp: int) -> None:
    pp, count = 4, 16
    result = predict(np.full((1, count), 12), ParallelLayout(pp=pp, vpp=vpp))
    assert result.seconds == pytest.approx(12 / pp * (count + (pp - 1) / vpp))


def test_barrier_and_lockstep_without_a_pipeline() -> None:
    costs = np.array([[5, 1], [2, 3], [4, 4], [1, 1]])
    assert predict(costs, ParallelLayout(dp=4)).seconds == 8
    assert predict(costs, ParallelLayout(dp=4, ep=4)).seconds == 5 + 4
    # Two groups of two ranks; each is in lock-step, the barrier waits for the slower.
    assert predict(costs, ParallelLayout(dp=4, ep=2)).seconds == max(5 + 3, 4 + 4)
    assert predict(costs, ParallelLayout(dp=4, cp=2, ep=4)).seconds == 8
    assert predict(costs, ParallelLayout(dp=4)).bubble == pytest.approx(1 - 21 / 32)


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_order_is_that_of_megatrons_schedule_functions(layout: ParallelLayout) -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    count, group = layout.next_admissible(6), layout.group
    table = schedules.get_schedule_table(count, layout.vpp, group)
    for stage in range(layout.pp):
        ranks = SimpleNamespace(size=lambda: layout.pp, rank=lambda stage=stage: stage)
        virtual = layout.vpp if layout.vpp > 1 else None
        communicator = SimpleNamespace(pp_group=ranks, virtual_pipeline_model_parallel_size=virtual)
        total, _, warm_up, remaining = schedules.get_pp_rank_microbatches(
            count, layout.vpp, group, p2p_communicator=communicator
        )
        passes = stage_order(stage, count, layout)
        forwards = [(p.micro_batch, p.chunk) for p in passes if p.is_forward]
        backwards = [(p.micro_batch, layout.vpp - 1 - p.chunk) for p in passes if not p.is_forward]
        assert forwards == backwards == table
        assert len(table) == total
        steady = [True, False] * remaining
        assert [p.is_forward for p in passes] == [True] * warm_up + steady + [False] * warm_up


def test_a_stage_runs_one_pass_at_a_time() -> None:
    layout = ParallelLayout(pp=3, vpp=2)
    starts, ends = pass_times(np.array([[3.0, 9.0, 1.0, 5.0, 2.0, 7.0]]), layout)
    by_stage = defaultdict(list)
    for (stage, item), start in starts.items():
        by_stage[stage].append((float(start[0]), float(ends[stage, item][0])))
    for spans in by_stage.values():
        spans.sort()
        assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))

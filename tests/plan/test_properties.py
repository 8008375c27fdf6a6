"""Guarantees of a plan over random batches, layouts and options; lower bounds; known optima."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dynbatch.geometry import most_response_rows, padded_length
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.plan.cost import TOKENS
from megatron_dynbatch.plan.distributions import DISTRIBUTIONS, draw_lengths, draw_rollout_ids
from megatron_dynbatch.plan.packing.bounds import makespan_bound, martello_toth_bound
from megatron_dynbatch.plan.summary import summarize
from megatron_dynbatch.rollouts.index import SampleIndex
from tests.plan.helpers import make_index

LAYOUTS = st.builds(
    ParallelLayout,
    dp=st.sampled_from([1, 2, 3, 8]),
    cp=st.sampled_from([1, 2, 8]),
    tp=st.sampled_from([1, 2]),
    pp=st.just(2),
    vpp=st.sampled_from([1, 2]),
    vpp_group=st.sampled_from([None, 3, 4]),
    ep=st.sampled_from([1, 2, 8]),
    sequence_parallel=st.booleans(),
    fp8=st.sampled_from([None, "fp8"]),
)


@st.composite
def indices(draw: st.DrawFn) -> SampleIndex:
    size = draw(st.integers(1, 60))
    column = st.lists(st.integers(1, 400), min_size=size, max_size=size)
    lengths = np.array(draw(column))
    responses = np.minimum(lengths - 1, np.array(draw(column)) - 1)
    masks = np.minimum(responses, np.array(draw(column)) % 9)
    ids = np.array(draw(st.lists(st.integers(-1, 20), min_size=size, max_size=size)))
    groups = np.where(ids >= 0, ids // 3, -1)
    return SampleIndex(lengths, responses, masks, ids, groups)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    index=indices(),
    layout=LAYOUTS,
    oversize=st.sampled_from(["alone", "drop"]),
    leftover=st.sampled_from(["partial", "even", "carry", "drop"]),
    reduction=st.sampled_from(["rollout", "sample", "token", "group"]),
    empty=st.sampled_from(["count", "skip"]),
    rollouts_per_step=st.sampled_from([None, 20, 70]),
    caps=st.sampled_from([{}, {"max_logits_per_gpu": 60_000, "vocab_size": 1000}]),
)
def test_every_guarantee(
    index: SampleIndex,
    layout: ParallelLayout,
    oversize: str,
    leftover: str,
    reduction: str,
    empty: str,
    rollouts_per_step: int | None,
    caps: dict[str, int],
) -> None:
    options = PlanOptions(
        max_tokens_per_gpu=256,
        oversize=oversize,
        leftover=leftover,
        loss_reduction=reduction,
        empty_rollouts=empty,
        rollouts_per_step=70
        if rollouts_per_step == 20 and reduction == "group"
        else (rollouts_per_step),
        **caps,  # type: ignore[arg-type]
    )
    plan = make_plan(index, layout, options)
    plan.check()
    assert Plan.from_json(plan.to_json()).fingerprint == plan.fingerprint
    assert make_plan(index, layout, options).fingerprint == plan.fingerprint
    schedule = plan.to_schedule()
    assert Plan.from_schedule(schedule, index, layout, options).fingerprint == plan.fingerprint
    for figures in summarize(plan):
        assert figures.num_microbatches >= figures.fewest_microbatches
        assert figures.balance >= 1
        assert figures.lockstep >= 1
        assert 0 <= figures.bubble < 1


@settings(max_examples=30, deadline=None)
@given(index=indices(), layout=LAYOUTS, size=st.integers(1, 5))
def test_every_guarantee_of_static_micro_batches(
    index: SampleIndex, layout: ParallelLayout, size: int
) -> None:
    plan = make_plan(index, layout, PlanOptions(micro_batch_size=size, rollouts_per_step=30))
    plan.check()
    for figures in summarize(plan):
        assert figures.num_microbatches == figures.fewest_microbatches


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("cp", [1, 8])
@pytest.mark.parametrize("num_samples", [1, 3, 255, 256, 261])
def test_named_distributions(name: str, cp: int, num_samples: int) -> None:
    layout = ParallelLayout(dp=8, cp=cp, pp=2, vpp=2, vpp_group=4)
    lengths = draw_lengths(name, num_samples, seed=num_samples)
    absent = np.full(num_samples, -1)
    index = SampleIndex(
        lengths, lengths - 1, lengths - 1, draw_rollout_ids(num_samples, seed=1), absent
    )
    cap = DISTRIBUTIONS[name].capacity // cp
    plan = make_plan(index, layout, PlanOptions(max_tokens_per_gpu=cap, oversize="alone"))
    plan.check()
    (figures,) = summarize(plan)
    following = layout.next_admissible(figures.fewest_microbatches + 1)
    assert figures.num_microbatches in (figures.fewest_microbatches, following)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_rank_sums_are_even_where_there_are_enough_samples(name: str, seed: int) -> None:
    lengths = draw_lengths(name, 256, seed)
    index = make_index(lengths.tolist())
    options = PlanOptions(max_tokens_per_gpu=DISTRIBUTIONS[name].capacity)
    (figures,) = summarize(make_plan(index, ParallelLayout(dp=8), options))
    assert figures.balance <= 1.005
    (lockstep,) = summarize(make_plan(index, ParallelLayout(dp=8, ep=8), options))
    assert lockstep.lockstep <= figures.lockstep + 1e-3


def partitions(items: list[int]) -> list[list[list[int]]]:
    """All set partitions."""
    if not items:
        return [[]]
    rest = partitions(items[1:])
    result = []
    for blocks in rest:
        result.append([[items[0]], *blocks])
        for place, block in enumerate(blocks):
            result.append([*blocks[:place], [items[0], *block], *blocks[place + 1 :]])
    return result


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(20, 32))
def test_fewest_micro_batches_against_brute_force(lengths: list[int], cap: int) -> None:
    fewest = min(
        len(blocks)
        for blocks in partitions(list(range(len(lengths))))
        if all(sum(lengths[i] for i in block) <= cap for block in blocks)
    )
    plan = make_plan(make_index(lengths), ParallelLayout(), PlanOptions(max_tokens_per_gpu=cap))
    assert martello_toth_bound(np.array(lengths), cap) <= fewest
    assert plan.steps[0].num_microbatches == fewest


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=3, max_size=8), st.integers(2, 3))
def test_balance_against_brute_force(lengths: list[int], dp: int) -> None:
    optimum = min(
        max(
            sum(length for length, rank in zip(lengths, ranks, strict=True) if rank == r)
            for r in range(dp)
        )
        for ranks in itertools.product(range(dp), repeat=len(lengths))
    )
    options = PlanOptions(max_tokens_per_gpu=1000, cost=TOKENS)
    plan = make_plan(make_index(lengths), ParallelLayout(dp=dp), options)
    loads = [sum(lengths[i] for mb in rank for i in mb) for rank in plan.steps[0].micro_batches]
    assert makespan_bound(np.array(lengths), dp) <= optimum
    assert max(loads) == optimum


# Every way to put seven samples into two micro-batches on each of two ranks, none of them empty.
PLACES = np.array(list(itertools.product(range(4), repeat=7)))
PLACES = PLACES[(np.sort(PLACES, axis=1)[:, :, None] == np.arange(4)).any(axis=1).all(axis=1)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(10, 60), min_size=7, max_size=7), st.booleans())
def test_two_rows_against_brute_force(lengths: list[int], in_lockstep: bool) -> None:
    cap = max(lengths) + min(lengths)
    layout = ParallelLayout(dp=2, ep=2 if in_lockstep else 1)
    plan = make_plan(make_index(lengths), layout, PlanOptions(max_tokens_per_gpu=cap, cost=TOKENS))
    plan.check()
    if plan.steps[0].num_microbatches != 2:
        return
    loads = np.stack([np.where(place == PLACES, lengths, 0).sum(axis=1) for place in range(4)])
    loads = loads[:, (loads <= cap).all(axis=0)]
    # Places 0 and 1 are the first rank's; rows pair places 0 with 2 and 1 with 3.
    rows = np.maximum(loads[0], loads[2]) + np.maximum(loads[1], loads[3])
    ranks = np.maximum(loads[0] + loads[1], loads[2] + loads[3])
    (figures,) = summarize(plan)
    assert figures.seconds == (rows if in_lockstep else ranks).min()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 400), st.integers(0, 400), st.sampled_from([1, 2, 4]))
def test_response_rows_on_the_busiest_cp_rank(total: int, response: int, cp: int) -> None:
    response = min(response, total - 1)
    layout = ParallelLayout(cp=cp)
    padded = padded_length(total, layout)
    chunk = padded // (2 * cp) if cp > 1 else padded
    rows = [0] * cp
    for position in range(total - response - 1, total - 1):
        number = position // chunk
        rows[min(number, 2 * cp - 1 - number) if cp > 1 else 0] += 1
    found = most_response_rows(np.array([total]), np.array([response]), layout)
    assert found.tolist() == [max(rows)]


def test_logit_cap_splits_what_the_token_cap_would_join() -> None:
    index = SampleIndex(
        np.array([50, 50, 50, 50]),
        np.array([40, 40, 2, 2]),
        np.array([40, 40, 2, 2]),
        np.full(4, -1),
        np.full(4, -1),
    )
    free = PlanOptions(max_tokens_per_gpu=200)
    assert make_plan(index, ParallelLayout(), free).steps[0].num_microbatches == 1
    capped = PlanOptions(max_tokens_per_gpu=200, max_logits_per_gpu=50_000, vocab_size=1000)
    plan = make_plan(index, ParallelLayout(), capped)
    plan.check()
    assert plan.steps[0].num_microbatches == 2
    # Twice the tensor parallelism halves the logits of a row.
    assert make_plan(index, ParallelLayout(tp=2), capped).steps[0].num_microbatches == 1

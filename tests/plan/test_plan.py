"""JSON, fingerprint, and `check()` against plans broken in one place each."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megatron_dynbatch.plan import ParallelLayout, Plan, PlanError, PlanOptions, make_plan
from tests.plan.helpers import make_index

LAYOUT = ParallelLayout(dp=2)


@pytest.fixture
def plan() -> Plan:
    index = make_index([9, 9, 9, 4, 5], rollout_ids=[0, 0, 1, 2, 3], group_ids=[0, 0, 0, 1, 1])
    options = PlanOptions(max_tokens_per_gpu=10, rollouts_per_step=2, loss_reduction="group")
    plan = make_plan(index, LAYOUT, options)
    plan.check()
    return plan


@pytest.mark.parametrize("options", [{}, {"loss_reduction": "constant", "loss_constant": 2.5}])
def test_json_round_trip(options: dict[str, object]) -> None:
    settings = PlanOptions(max_tokens_per_gpu=10, rollouts_per_step=2, **options)  # type: ignore[arg-type]
    plan = make_plan(make_index([9, 3, 4]), LAYOUT, settings)
    again = Plan.from_json(plan.to_json())
    again.check()
    assert again.steps == plan.steps
    assert again.options == plan.options
    assert again.layout == plan.layout
    assert again.sample_denoms.dtype == plan.sample_denoms.dtype
    assert again.fingerprint == plan.fingerprint


def test_json_of_another_version_or_of_something_else(plan: Plan) -> None:
    values = json.loads(plan.to_json())
    with pytest.raises(PlanError, match="format version 99"):
        Plan.from_json(json.dumps({**values, "version": 99}))
    with pytest.raises(PlanError, match="not the JSON of a plan"):
        Plan.from_json("[]")
    with pytest.raises(PlanError, match="not the JSON of a plan"):
        Plan.from_json("{")


def test_fingerprint_covers_everything_that_ranks_agree_on(plan: Plan) -> None:
    step = plan.steps[0]
    swapped = replace(step, micro_batches=step.micro_batches[::-1])
    others = [
        replace(plan, steps=(swapped, *plan.steps[1:])),
        replace(plan, sample_denoms=plan.sample_denoms + 1),
        replace(plan, layout=replace(plan.layout, tp=2)),
        replace(plan, options=replace(plan.options, empty_rollouts="skip")),
        replace(plan, index=make_index([9, 9, 9, 4, 6], rollout_ids=[0, 0, 1, 2, 3])),
    ]
    assert len({plan.fingerprint, *(other.fingerprint for other in others)}) == 6


def _with_step(plan: Plan, **changes: object) -> Plan:
    step = replace(plan.steps[0], **changes)  # type: ignore[arg-type]
    return replace(plan, steps=(step, *plan.steps[1:]))


def _broken(plan: Plan) -> list[tuple[Plan, str]]:
    ranks = plan.steps[0].micro_batches
    doubled = (ranks[0], (ranks[0][0], *ranks[1][1:]))
    lost = ((ranks[0][0][1:], *ranks[0][1:]), ranks[1])
    uneven = (ranks[0], (*ranks[1], ()))
    padded = tuple((*rank, ()) for rank in ranks)
    merged = tuple((rank[0] + rank[1], ()) for rank in ranks)
    steps = plan.steps
    denoms = plan.sample_denoms.copy()
    denoms[2] += 1
    one_step = (0, 1), (2,), (3, 4)
    cut = tuple(replace(steps[1], micro_batches=((rows[:1],), (rows[1:],))) for rows in one_step)
    return [
        (_with_step(plan, micro_batches=doubled), "is placed [02] times"),
        (_with_step(plan, micro_batches=lost), "is placed 0 times"),
        (_with_step(plan, micro_batches=uneven), "DP rank 1 has 3 micro-batches, rank 0 has 2"),
        (_with_step(plan, micro_batches=padded), "step 0 has 3 dummies .* though 2 would hold"),
        (_with_step(plan, micro_batches=merged), "take 18 tokens as laid out, the cap is 10"),
        (_with_step(plan, step_global_batch_size=3), "step_global_batch_size is 3, .* say 2"),
        (_with_step(plan, loss_denominator=5), "loss_denominator is 5"),
        (_with_step(plan, num_trained_tokens=1), "num_trained_tokens is 1, .* say 27"),
        (replace(plan, steps=cut), "prompt group 0 .* is cut"),
        (replace(plan, steps=steps[:1]), "sample 3 .* placed 0 times"),
        (replace(plan, steps=steps[:1], carried=(3, 4)), "carried under leftover 'partial'"),
        (replace(plan, sample_denoms=denoms), "denominator of sample 2 is 28, .* it is 27"),
        (replace(plan, sample_denoms=denoms.astype(float)), "sample_denoms must be int64"),
        (replace(plan, oversize=(1,)), r"oversize samples are \[\], reported \[1\]"),
        (replace(plan, layout=ParallelLayout(dp=3)), "has 2 DP ranks, the layout 3"),
        (replace(plan, dropped=(9,)), "row 9 does not exist"),
        (
            replace(plan, layout=ParallelLayout(dp=2, pp=3, vpp=2)),
            "step 0 has 2 micro-batches per rank; .* needs 3",
        ),
    ]


@pytest.mark.parametrize("case", range(17))
def test_check_names_what_is_violated(plan: Plan, case: int) -> None:
    broken, message = _broken(plan)[case]
    with pytest.raises(PlanError, match=message):
        broken.check()


def test_check_finds_a_dummy_that_splitting_would_have_avoided() -> None:
    plan = make_plan(make_index([2, 2]), LAYOUT, PlanOptions(max_tokens_per_gpu=10))
    with pytest.raises(PlanError, match="1 dummy micro-batch, 2 x 1 .* need 0"):
        _with_step(plan, micro_batches=(((0, 1),), ((),))).check()


def test_planning_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_dynbatch.plan\n"
        "print([m for m in ('torch', 'megatron', 'megatron.core') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"


def test_fingerprint_does_not_depend_on_the_hash_seed(plan: Plan) -> None:
    code = (
        "from tests.plan.helpers import plan_lengths\n"
        "print(plan_lengths([9, 9, 9, 4, 5], 10).fingerprint)"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(prints) == 1


def test_indices_are_plain_numbers(plan: Plan) -> None:
    rows = [row for rank in plan.steps[0].micro_batches for mb in rank for row in mb]
    assert {type(row) for row in rows} == {int}
    assert plan.steps[0].samples.dtype == np.int64

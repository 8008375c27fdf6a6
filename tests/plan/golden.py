"""Fingerprints of plans stay what they are: on every platform, Python and NumPy.

`tests.plan.test_golden` compares them here, `tests.versions.test_plans` in another Python and with
another NumPy: this module needs the package and NumPy alone. When the planner is meant to plan
differently, `python -m tests.plan.golden` prints the new ones, as JSON.
"""

from __future__ import annotations

import json

import numpy as np

from megatron_dynbatch.plan import CostModel, ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.rollouts.index import SampleIndex

# name: samples, layout, options.
CASES: dict[str, tuple[int, ParallelLayout, PlanOptions]] = {
    "one rank": (40, ParallelLayout(), PlanOptions(max_tokens_per_gpu=9000)),
    "barrier": (300, ParallelLayout(dp=8), PlanOptions(max_tokens_per_gpu=9000)),
    "lock-step": (300, ParallelLayout(dp=8, ep=8), PlanOptions(max_tokens_per_gpu=9000)),
    "interleaved pipeline": (
        120,
        ParallelLayout(dp=4, pp=2, vpp=2, vpp_group=4),
        PlanOptions(max_tokens_per_gpu=9000),
    ),
    "context parallel, steps": (
        200,
        ParallelLayout(dp=4, cp=4, tp=2, sequence_parallel=True),
        PlanOptions(
            max_tokens_per_gpu=2300, rollouts_per_step=30, leftover="even", loss_reduction="token"
        ),
    ),
    "tight": (2000, ParallelLayout(dp=4), PlanOptions(max_tokens_per_gpu=12_000)),
    "static": (101, ParallelLayout(dp=4), PlanOptions(micro_batch_size=3)),
    "float costs": (
        300,
        ParallelLayout(dp=8),
        PlanOptions(max_tokens_per_gpu=9000, cost=CostModel(alpha=3.1e-6, beta=2.7e-11)),
    ),
}

FINGERPRINTS = {
    "one rank": "cb0325509b89b31a180bf787881cbbe2e30d6bd917ebc72b985471ea822d8107",
    "barrier": "48fdc2f33286f6e025623d1aed28620b093415736703335e3cdd06a076f77956",
    "lock-step": "0ff21ee9fb20091a3da3dda0bcd5ca024b78b416eb8615c1ba59b509639b15db",
    "interleaved pipeline": "e8d49837b25d087dac2d06dad1fd81f24594b0048aae5c032f8fd7144eabf217",
    "context parallel, steps": "6e30efadfae3e15a8b0445c3c034979c790c04fc8f49536bcbb38b03163db53c",
    "tight": "b3f02cc8da01c050ed398ec5ff121c31245d4609ec4d15a6f2ea5552e2f82115",
    "static": "15d431ea51729de37a3838349824bd6f9af5ba165b5c898491b63fbad5f2c740",
    "float costs": "559d528ed9eab0e5e4231e5216c91c36dee3582bd7e7496ad766c1a779bb737b",
}


def plan_case(name: str) -> Plan:
    """Lengths come from a recurrence of integers, so that no generator is part of the case."""
    num_samples, layout, options = CASES[name]
    state = np.uint64(12345)
    lengths = np.zeros(num_samples, dtype=np.int64)
    for row in range(num_samples):
        state = np.uint64((int(state) * 6364136223846793005 + 1442695040888963407) % 2**64)
        draw = int(state) >> 33
        lengths[row] = 16 + draw % 700 * (1 + draw // 700 % 12)
    rollouts = np.arange(num_samples) * 2 // 3
    index = SampleIndex(lengths, lengths // 2, lengths // 3, rollouts, rollouts // 4)
    plan = make_plan(index, layout, options)
    plan.check()
    return plan


if __name__ == "__main__":
    print(json.dumps({name: plan_case(name).fingerprint for name in CASES}, indent=4))

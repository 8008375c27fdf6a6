"""Against an exact solver (OR-tools CP-SAT), where it is installed: the extra `test`."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.plan.summary import summarize
from tests.plan.helpers import make_index

cp_model = pytest.importorskip("ortools.sat.python.cp_model")


def solve(costs: list[int], sizes: list[int], cap: int, num_bins: int) -> int | None:
    """The smallest possible cost of the dearest of num_bins bins; None if nothing fits."""
    model = cp_model.CpModel()
    inside = [[model.new_bool_var("") for _ in range(num_bins)] for _ in costs]
    dearest = model.new_int_var(0, sum(costs), "")
    for variables in inside:
        model.add_exactly_one(variables)
    for number in range(num_bins):
        members = [variables[number] for variables in inside]
        model.add(sum(s * m for s, m in zip(sizes, members, strict=True)) <= cap)
        model.add(sum(c * m for c, m in zip(costs, members, strict=True)) <= dearest)
    model.minimize(dearest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 20
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL
    return round(solver.objective_value)


@pytest.mark.parametrize("seed", range(8))
def test_fewest_micro_batches_of_sixteen_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(15, 60, 16).tolist()
    plan = make_plan(make_index(lengths), ParallelLayout(), PlanOptions(max_tokens_per_gpu=100))
    plan.check()
    count = plan.steps[0].num_microbatches
    (figures,) = summarize(plan)
    if count > figures.fewest_microbatches:
        assert solve([0] * 16, lengths, 100, count - 1) is None


@pytest.mark.parametrize("seed", range(8))
def test_dearest_of_one_row_of_sixteen_samples(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    lengths = np.rint(rng.lognormal(5, 0.8, 16)).astype(int).tolist()
    dp = 4
    cap = round(1.1 * max(sum(lengths) / dp, max(lengths)))
    options = PlanOptions(max_tokens_per_gpu=cap)
    plan = make_plan(make_index(lengths), ParallelLayout(dp=dp), options)
    plan.check()
    assert plan.steps[0].num_microbatches == 1
    costs = [24576 * length + length**2 for length in lengths]
    optimum = solve(costs, lengths, cap, dp)
    assert optimum is not None
    ranks = plan.steps[0].micro_batches
    dearest = max(sum(costs[row] for row in rank[0]) for rank in ranks)
    print(seed, dearest / optimum)
    assert dearest <= optimum * 1.02

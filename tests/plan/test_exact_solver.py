"""Against an exact solver (OR-tools CP-SAT), where it is installed: the extra `test`."""

from __future__ import annotations

import os

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


@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_dearest_of_one_row_of_sixteen_samples_is_the_optimum(seed: int, ep: int) -> None:
    rng = np.random.default_rng(100 + seed)
    lengths = np.rint(rng.lognormal(5, 0.8, 16)).astype(int).tolist()
    dp = 4
    cap = round(1.1 * max(sum(lengths) / dp, max(lengths)))
    options = PlanOptions(max_tokens_per_gpu=cap)
    plan = make_plan(make_index(lengths), ParallelLayout(dp=dp, ep=ep), options)
    plan.check()
    assert plan.steps[0].num_microbatches == 1
    costs = [24576 * length + length**2 for length in lengths]
    optimum = solve(costs, lengths, cap, dp)
    assert optimum is not None
    ranks = plan.steps[0].micro_batches
    dearest = max(sum(costs[row] for row in rank[0]) for rank in ranks)
    assert dearest == optimum


def best_bound(costs: list[int], sizes: list[int], cap: int, plan: list[list[list[int]]]) -> float:
    """What no placement with the count of this plan goes below, as far as 20 seconds tell.

    The figure is Σ_k max_r cost[k, r]: the time of ranks in lock-step; with one row, the barrier.
    """
    model = cp_model.CpModel()
    dp, num_rows = len(plan), len(plan[0])
    rank_of = {
        item: (k, r) for r, rank in enumerate(plan) for k, mb in enumerate(rank) for item in mb
    }
    dearest = [model.new_int_var(0, sum(costs), "") for _ in range(num_rows)]
    inside: dict[tuple[int, int, int], object] = {}
    for item in range(len(costs)):
        for k in range(num_rows):
            for r in range(dp):
                inside[item, k, r] = model.new_bool_var("")
                model.add_hint(inside[item, k, r], rank_of[item] == (k, r))
        model.add_exactly_one(inside[item, k, r] for k in range(num_rows) for r in range(dp))
    for k in range(num_rows):
        for r in range(dp):
            members = [(item, inside[item, k, r]) for item in range(len(costs))]
            model.add(sum(sizes[item] * member for item, member in members) <= cap)
            model.add(sum(costs[item] * member for item, member in members) <= dearest[k])
    for row, following in zip(dearest, dearest[1:], strict=False):
        model.add(row >= following)
    model.add(dp * sum(dearest) >= sum(costs))
    model.minimize(sum(dearest))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 20
    assert solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return float(solver.best_objective_bound)


@pytest.mark.skipif(os.environ.get("PLAN_SOLVER") != "full", reason="run by `make plan-solver`")
@pytest.mark.parametrize("num_samples", [20, 32, 40])
@pytest.mark.parametrize(("dp", "rows"), [(2, 2), (4, 1), (4, 2)])
@pytest.mark.parametrize("in_lockstep", [False, True])
def test_near_the_bound_of_up_to_forty_samples(
    num_samples: int, dp: int, rows: int, in_lockstep: bool
) -> None:
    draws = np.random.default_rng(num_samples).lognormal(5, 0.8, num_samples)
    lengths = np.rint(draws).astype(int).tolist()
    cap = round(1.1 * max(sum(lengths) / dp / rows, max(lengths)))
    layout = ParallelLayout(dp=dp, ep=dp if in_lockstep else 1)
    plan = make_plan(make_index(lengths), layout, PlanOptions(max_tokens_per_gpu=cap))
    plan.check()
    ranks = [[list(rows) for rows in rank] for rank in plan.steps[0].micro_batches]
    costs = plan.options.cost.sample_costs(plan.index.total_lengths).astype(int).tolist()
    grid = np.array([[sum(costs[row] for row in rows) for rows in rank] for rank in ranks])
    if in_lockstep:
        figure, bound = int(grid.max(axis=0).sum()), best_bound(costs, lengths, cap, ranks)
    else:
        # Without lock-step the caps of a rank's micro-batches are what keeps it from even sums.
        whole = [[[row for rows in rank for row in rows]] for rank in ranks]
        figure = int(grid.sum(axis=1).max())
        bound = best_bound(costs, lengths, cap * len(ranks[0]), whole)
    assert figure <= 1.02 * bound

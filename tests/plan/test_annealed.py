"""Lock-step on sixteen stored instances: near an annealing of minutes, below LPT alone."""

from __future__ import annotations

import json

import pytest

from benchmarks.plan_anneal import (
    INSTANCES,
    STORE,
    instance_costs,
    lockstep_cost,
    our_ranks,
)
from benchmarks.plan_baselines import longest_processing_time
from megatron_dynbatch.plan.distributions import DISTRIBUTIONS

STORED = json.loads(STORE.read_text())


def test_every_named_instance_is_stored() -> None:
    named = [(row["distribution"], row["dp"], row["seed"]) for row in STORED]
    assert named == list(INSTANCES)
    assert all(row["proposals"] >= 1_000_000 for row in STORED)


@pytest.mark.parametrize("row", STORED, ids=lambda row: f"{row['distribution']}-dp{row['dp']}")
def test_lockstep_is_near_the_annealed(row: dict) -> None:  # type: ignore[type-arg]
    ranks = our_ranks(row["distribution"], row["dp"], row["seed"])
    lengths, costs = instance_costs(row["distribution"], row["seed"])
    assert len(ranks[0]) == row["num_microbatches"]
    mean = sum(costs) / row["dp"]
    lockstep = lockstep_cost(ranks, costs)
    assert lockstep / mean <= 1.02 * row["annealed"]
    cap = DISTRIBUTIONS[row["distribution"]].capacity
    lpt = longest_processing_time(lengths, costs, row["dp"], cap, len(ranks[0]))
    assert lpt is None or lockstep <= lockstep_cost(lpt, costs)

"""The comparison notices a NaN, an infinity and a gap in whatever it compares."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch

from tests.deviation import between_named, largest, relative
from tests.parity.compare import deviations
from tests.parity.job import Observed, Shard
from tests.parity.reference import ReferenceStep

STEPS = [
    ReferenceStep(
        {"loss": 2.0, "kl": 0.0}, 3.0, rate, decay, consumed, {"w": ones}, {"w": 2 * ones}
    )
    for ones, rate, decay, consumed in (
        (torch.ones(4, 2), r, 2 * r, n) for r, n in ((0.2, 5), (0.1, 8))
    )
]


def rank(tp: int) -> Observed:
    """What one of two tensor-parallel ranks sees of exactly these steps; rank 1 has the metrics."""
    half = torch.ones(2, 2)
    return Observed(
        rows=[
            {
                "iteration": n,
                "learning_rate": step.learning_rate,
                "grad_norm": step.grad_norm,
                "consumed": step.consumed,
                **(step.metrics if tp else {}),
            }
            for n, step in enumerate(STEPS, 1)
        ],
        learning_rates=[0.3, 0.2],
        weight_decays=[0.6, 0.4],
        gradients=[{"w": Shard(half, 0, tp, 1)} for _ in STEPS],
        parameters=[{"w": Shard(2 * half, 0, tp, 1)} for _ in STEPS],
    )


def put_row(name: str, value: float, observed: Observed) -> None:
    observed.rows[1][name] = value


def put_last(name: str, value: float, observed: Observed) -> None:
    getattr(observed, name)[1] = value


def put_tensor(name: str, value: float, observed: Observed) -> None:
    shard = getattr(observed, name)[1]["w"]
    shard.values = shard.values.clone()
    shard.values[1, 0] = value


PLACES: dict[str, list[Callable[[float, Observed], None]]] = {
    "metrics": [lambda v, o: put_row("loss", v, o), lambda v, o: put_row("kl", v, o)],
    "grad norm": [lambda v, o: put_row("grad_norm", v, o)],
    "learning rate": [
        lambda v, o: put_row("learning_rate", v, o),
        lambda v, o: put_last("learning_rates", v, o),
    ],
    "weight decay": [lambda v, o: put_last("weight_decays", v, o)],
    "gradients": [lambda v, o: put_tensor("gradients", v, o)],
    "parameters": [lambda v, o: put_tensor("parameters", v, o)],
}


def test_equal_runs_deviate_nowhere() -> None:
    found = deviations([rank(0), rank(1)], STEPS)
    assert found == dict.fromkeys([*PLACES, "consumed"], 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("quantity", "put"), [(name, put) for name, puts in PLACES.items() for put in puts]
)
def test_what_is_not_finite_deviates_infinitely(
    quantity: str, put: Callable[[float, Observed], None], value: float
) -> None:
    observed = [rank(0), rank(1)]
    put(value, observed[1])
    assert deviations(observed, STEPS)[quantity] == math.inf


def test_a_reference_that_is_not_finite_agrees_with_nothing() -> None:
    steps = copy.deepcopy(STEPS)
    steps[0].metrics["loss"] = math.nan
    observed = [rank(0), rank(1)]
    observed[1].rows[0]["loss"] = math.nan
    assert deviations(observed, steps)["metrics"] == math.inf


REMOVALS: dict[str, Callable[[Observed], object]] = {
    "a metric": lambda o: o.rows[1].pop("kl"),
    "a step": lambda o: o.rows.pop(),
    "a rate": lambda o: o.learning_rates.pop(),
    "a weight decay": lambda o: o.weight_decays.pop(),
    "the gradients of a step": lambda o: o.gradients.pop(),
    "the gradients of a rank": lambda o: o.gradients.clear(),
    "a parameter": lambda o: o.parameters[0].clear(),
}


@pytest.mark.parametrize("what", REMOVALS)
def test_what_is_missing_on_one_side_is_a_failure(what: str) -> None:
    observed = [rank(0), rank(1)]
    REMOVALS[what](observed[1])
    try:
        # Half of a tensor has another shape than the whole.
        assert deviations(observed, STEPS)["parameters"] == math.inf
    except AssertionError as error:
        assert what != "a parameter", error


def test_a_metric_or_tensor_too_many_is_a_failure() -> None:
    observed = [rank(0), rank(1)]
    observed[1].rows[0]["ratio"] = 1.0
    with pytest.raises(AssertionError, match="reports"):
        deviations(observed, STEPS)
    one = torch.ones(1)
    for ours, theirs in (({"a": one}, {}), ({}, {"a": one})):
        with pytest.raises(AssertionError, match="names differ"):
            between_named(ours, theirs)


def test_the_largest_is_never_hidden_by_what_follows() -> None:
    for values in ([math.nan, 1.0], [1.0, math.nan], [math.inf, 0.0]):
        assert largest(values) == math.inf
    assert largest([]) == 0.0 and largest([0.5, 2.0, 1.0]) == 2.0
    assert relative(1.0, 0.0) == 1.0 and relative(3.0, -2.0) == 2.5
    assert between_named({"w": torch.ones(1)}, {"w": torch.ones(3)}) == math.inf

"""Expert frequencies of a step: what is known when. Parity holds the losses against the loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dynbatch.hooks.balance import StepBalance
from tests.pool import run_ranks


def router(layer: int, *, of_mtp: bool = False) -> Any:
    config = SimpleNamespace(num_layers=2)
    return SimpleNamespace(layer_number=layer, is_mtp_layer=of_mtp, config=config)


def choices(*tokens: tuple[int, int]) -> torch.Tensor:
    """[T, 4] with two experts for each token."""
    chosen = torch.zeros(len(tokens), 4, dtype=torch.bool)
    for row, experts in zip(chosen, tokens, strict=True):
        row[list(experts)] = True
    return chosen


def frequencies_over_steps() -> list[list[float]]:
    """Two ranks with a token of layer 2 (of 2 + MTP) each, then a step of other experts."""
    rank = torch.distributed.get_rank()
    balance = StepBalance(3, 4, 2, from_same_step=False)
    second, mtp = router(2), router(1, of_mtp=True)
    seen = [balance.frequencies(second).tolist()]
    device = torch.device("cpu")
    for own in (choices((0, 1)) if rank else choices((0, 2)), choices((2, 3))):
        balance.begin()
        balance.count(second, choices((1, 3)))  # of a run that is done again
        balance.begin()
        balance.count(second, own)
        balance.count(mtp, choices((3, 2)))
        seen.append(balance.frequencies(second).tolist())  # still those of the step before
        balance.settle(2, device)
        seen.append(balance.frequencies(second).tolist())
    saved = balance.to_dict()
    resumed = StepBalance(3, 4, 2, from_same_step=False, saved=saved)
    return [*seen, resumed.frequencies(second).tolist(), resumed.frequencies(mtp).tolist()]


def test_frequencies_are_those_of_the_last_settled_step() -> None:
    first, second = [1.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 1.0]
    expected = [[0.5] * 4, [0.5] * 4, first, first, second, second, [0.0, 0.0, 1.0, 1.0]]
    assert run_ranks(2, frequencies_over_steps) == [expected, expected]


def count_twice() -> None:
    balance = StepBalance(1, 4, 2, from_same_step=True)
    for _ in range(2):
        balance.count(router(1), choices((0, 1)))
    with pytest.raises(AssertionError, match=r"\[4\] routed tokens were counted in a step of 1"):
        balance.settle(1, torch.device("cpu"))


def test_a_token_that_is_counted_twice_is_noticed() -> None:
    run_ranks(1, count_twice)

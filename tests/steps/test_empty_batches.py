"""A batch that trains nothing is said, with the reason; several in a row are an error."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDataError, RolloutQueue, Sample
from megatron_dynbatch.steps import Exchange, Staleness, StepFeed

TRAINED = [Sample([1, 2, 3], 2)]
MASKED = [Sample([1, 2, 3], loss_mask=[0, 0], rollout_id=n) for n in (0, 0, 1)]
OLD = [Sample([1, 2, 3], 2, policy_version=0)]
LONG = [Sample(list(range(40)), 2)]


def feed(batches: list[list[Sample]], **options: object) -> StepFeed:
    queue = RolloutQueue("rollouts")
    for samples in batches:
        queue.write(samples)
    queue.finish()
    leftover = str(options.pop("leftover", "partial"))
    rollouts = options.pop("rollouts_per_step", None)
    chosen = PlanOptions(
        max_tokens_per_gpu=16, oversize="drop", leftover=leftover, rollouts_per_step=rollouts
    )  # type: ignore[arg-type]
    return StepFeed(queue, ParallelLayout(), chosen, batch_timeout=600.0, **options)  # type: ignore[arg-type]


def train(steps: StepFeed) -> list[int]:
    """The batch of each step."""
    batches = []
    while (step := steps.open_step()) is not None:
        batches.append(step.batch_id)
        steps.finish_step()
    steps.close()
    return batches


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (MASKED, "2 rollouts without a trained token (masks are all zero)"),
        (OLD, "1 rollout dropped as stale"),
        (LONG, "1 rollout dropped (too long, or left over)"),
        (
            [MASKED[2], Sample([1, 2], 1, rollout_id=5, policy_version=0),
             Sample(list(range(40)), 2, rollout_id=6)],
            "1 rollout without a trained token (masks are all zero), 1 rollout dropped (too long, "
            "or left over), 1 rollout dropped as stale",
        ),
    ],
)  # fmt: skip
def test_a_batch_that_trains_nothing_is_said(
    capsys: pytest.CaptureFixture[str], samples: list[Sample], why: str
) -> None:
    assert train(feed([TRAINED, TRAINED, samples, TRAINED], staleness=Staleness(1))) == [0, 1, 3]
    said = [line for line in capsys.readouterr().out.splitlines() if "trains nothing" in line]
    assert said == [f"[megatron_dynbatch] rollout batch 2 trains nothing: {why}"]


def test_three_in_a_row_are_an_error_and_two_are_not() -> None:
    steps = feed([MASKED, MASKED, TRAINED, MASKED, MASKED, MASKED, TRAINED])
    with pytest.raises(RolloutDataError, match="rollout batches 3, 4, 5 train nothing .2 rollouts"):
        train(steps)
    steps.close()
    assert train(feed([MASKED] * 3 + [TRAINED], max_empty_batches=4)) == [3]
    with pytest.raises(RolloutDataError, match="rollout batch 0 trains nothing"):
        train(feed([MASKED, TRAINED], max_empty_batches=1))


def test_a_batch_that_is_carried_whole_is_not_empty(capsys: pytest.CaptureFixture[str]) -> None:
    steps = feed([TRAINED] * 5, leftover="carry", rollouts_per_step=5)
    assert train(steps) == [4]
    assert "trains nothing" not in capsys.readouterr().out


def test_all_ranks_end_with_the_same_error() -> None:
    store = dist.HashStore()
    errors: dict[int, str] = {}

    def rank(number: int) -> None:
        exchange = Exchange(store, number, 2, timeout=600.0)
        steps = feed([MASKED] * 3, exchange=exchange, dp_rank=0)
        try:
            train(steps)
        except RolloutDataError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2 and errors[0] == errors[1]

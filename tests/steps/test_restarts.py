"""Whatever happens between batches and steps, each rollout is trained exactly once."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dynbatch.handshake import publish_layout, write_planned
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutQueue, Sample
from megatron_dynbatch.steps import Cursor, FeedConfig, StepFeed

OPTIONS = {"max_tokens_per_gpu": 32}


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "sizes": draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)),
        "per_step": draw(st.integers(1, 6)),
        "leftover": draw(st.sampled_from(["partial", "even", "carry", "drop"])),
        # After how many steps the job ends and goes on, and with how many DP ranks.
        "stops": draw(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), max_size=4)),
        "planned_for": draw(st.integers(1, 4)),
    }


def write(run: dict[str, Any]) -> tuple[RolloutQueue, list[list[int]]]:
    """Batches of rollouts of one to three samples each; the first token is the rollout's number."""
    queue = RolloutQueue()
    layout = ParallelLayout(dp=run["planned_for"])
    publish_layout(queue, layout, options(run))
    batches, number = [], 0
    for size in run["sizes"]:
        batch = list(range(number, number + size))
        batches.append(batch)
        number += size
        samples = [
            Sample([r, 7, k], 1, rollout_id=r - batch[0]) for r in batch for k in range(1 + r % 3)
        ]
        write_planned(queue, samples)
    queue.finish()
    return queue, batches


def options(run: dict[str, Any]) -> PlanOptions:
    return PlanOptions(**OPTIONS, rollouts_per_step=run["per_step"], leftover=run["leftover"])


def train(
    queue: RolloutQueue, run: dict[str, Any], dp: int, cursor: Cursor, limit: int | None
) -> tuple[list[list[int]], Cursor]:
    """Rollouts of each step as all DP ranks see them together, and the cursor after them."""
    config = FeedConfig(max_empty_batches=99)  # small batches may be dropped whole
    feeds = [
        StepFeed(queue, ParallelLayout(dp=dp), options(run), config, dp_rank=rank)
        for rank in range(dp)
    ]
    for feed in feeds:
        feed.restore(cursor)
    steps: list[list[int]] = []
    while limit is None or len(steps) < limit:
        opened = [feed.open_step() for feed in feeds]
        if opened[0] is None:
            break
        rollouts: list[int] = []
        for rank, step in enumerate(opened):
            assert step is not None
            rows = [row for rows in step.step_plan.micro_batches[rank] for row in rows]
            rollouts += [int(step.samples[row].tokens[0]) for row in rows]
        steps.append(sorted(rollouts))
        for feed in feeds:
            feed.finish_step()
    for feed in feeds:
        feed.close()
    return steps, Cursor.from_dict(feeds[0].cursor.to_dict())


@settings(max_examples=25, deadline=None)
@given(run=runs())
@example(run={"sizes": [1, 1, 1], "per_step": 2, "leftover": "drop", "stops": [], "planned_for": 1})
def test_restarts_with_any_number_of_ranks_change_no_step(run: dict[str, Any]) -> None:
    queue, batches = write(run)
    whole, end = train(queue, run, 1, Cursor(), None)
    steps, cursor = [], Cursor()
    for limit, dp in run["stops"]:
        more, cursor = train(queue, run, dp, cursor, limit)
        steps += more
    more, cursor = train(queue, run, 2, cursor, None)
    assert steps + more == whole
    assert cursor.consumed_rollouts == end.consumed_rollouts
    assert cursor.dropped_rollouts == end.dropped_rollouts

    # What is trained follows from the policy alone.
    per_step, leftover = run["per_step"], run["leftover"]
    trained = [rollout for step in whole for rollout in dict.fromkeys(step)]
    if leftover == "drop":
        kept = [r for batch in batches for r in batch[: len(batch) // per_step * per_step]]
        assert trained == kept
    else:
        assert trained == [r for batch in batches for r in batch]
    for step in whole:
        assert all(step.count(rollout) == 1 + rollout % 3 for rollout in step)

"""Other ways to split a step into micro-batches than the planner's, legal and often worse."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from megatron_dynbatch.plan import Plan, make_plan, padded_length
from megatron_dynbatch.plan.types import StepPlan

SPLITS = ("planner", "first-fit", "shuffled", "finest", "dummies")
"""`finest`: as many micro-batches as there are samples for; `dummies`: more than that."""


def split_by(kind: str) -> None:
    """Have the step feed of this process hand out plans that are split in another way."""
    from megatron_dynbatch.steps import announce

    if kind == "dummies":
        Plan.check = lambda self: None  # type: ignore[method-assign]  # forbids needless dummies

    def make_and_split(*positional: object, **named: object) -> Plan:
        plan: Plan = make_plan(*positional, **named)  # type: ignore[arg-type]
        if kind == "planner":
            return plan
        steps = tuple(_split(plan, step, kind) for step in plan.steps)
        return dataclasses.replace(plan, steps=steps)

    assert announce.make_plan is make_plan
    announce.make_plan = make_and_split


def _split(plan: Plan, step: StepPlan, kind: str) -> StepPlan:
    layout, rows = plan.layout, step.samples.tolist()
    if kind == "shuffled":
        random.Random(len(rows)).shuffle(rows)
    capacity = plan.options.capacity(layout)
    assert capacity is not None
    lengths = padded_length(plan.index.total_lengths, layout).tolist()
    bins = _first_fit(rows, lengths, capacity)
    if kind == "finest":
        admitted = [m for m in range(1, len(rows) + 1) if layout.admits(m)]
        fitting = [m for m in admitted if m * layout.dp <= len(rows)]
        count = max(fitting, default=layout.next_admissible(1))
    else:
        count = layout.next_admissible(-(-len(bins) // layout.dp))
    while len(bins) < count * layout.dp and max(map(len, bins)) > 1:
        widest = max(bins, key=len)
        bins.append([widest.pop()])
    if kind == "dummies":
        count = layout.next_admissible(count + 2)
    bins += [[] for _ in range(count * layout.dp - len(bins))]
    ranks = tuple(tuple(map(tuple, bins[rank :: layout.dp])) for rank in range(layout.dp))
    return dataclasses.replace(step, micro_batches=ranks)


def _first_fit(rows: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    for row in rows:
        for one in bins:
            if sum(lengths[r] for r in one) + lengths[row] <= capacity:
                one.append(row)
                break
        else:
            bins.append([row])
    return bins

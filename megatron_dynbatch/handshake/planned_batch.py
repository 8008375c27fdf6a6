"""A batch written with its plan, each data-parallel rank's samples as one part.

`write_planned` is the rollout side's; `checked_plan` is the trainer's look at such a plan before it
trusts it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import numpy as np

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.handshake.published_layout import read_layout
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.planner import make_plan
from megatron_dynbatch.plan.splitters import SPLITTERS
from megatron_dynbatch.plan.types import INDEX_FIELDS, NOT_A_PLAN, Plan
from megatron_dynbatch.rollouts import RolloutTransport, Sample, SampleIndex


def write_planned(
    transport: RolloutTransport,
    samples: Sequence[Sample],
    *,
    key: str | None = None,
    trusted: Collection[str] = (),
) -> int:
    """Plans a batch for the trainer and writes it with its plan; returns the batch id.

    Without a published layout the batch is written without a plan, and the trainer plans it. So it
    does with samples that it carried over from the batch before, of which nothing is known here.
    A published layout is data: a splitter or cost function that it names by import path is not
    imported here unless it is trusted, and the trainer plans.

    Args:
        transport: Where to.
        samples: At least one sample; siblings share a rollout_id.
        key: Names what is in the batch; see `RolloutTransport.write`.
        trusted: Import paths (`package.module:function`) that may be followed.

    Raises:
        RolloutDataError: The samples are not valid, or the run is finished.
        PlanError: A sample is longer than a micro-batch may be, or a step cannot be made.
    """
    published = read_layout(transport)
    if published is None or not samples:
        return transport.write(samples, key=key)
    layout, options = published
    if not import_paths(options) <= set(trusted):
        return transport.write(samples, key=key)
    plan = make_plan(SampleIndex.from_samples(samples), layout, options)
    return transport.write(samples, plan_text(plan), parts=rows_by_rank(plan), key=key)


def import_paths(options: PlanOptions) -> set[str]:
    """What planning with these options would import."""
    is_own = options.step_splitter not in SPLITTERS
    functions = [options.step_splitter] if is_own else []
    return {*functions, *filter(None, [options.cost.function])}


def rows_by_rank(plan: Plan) -> list[list[int]]:
    """For each data-parallel rank its rows, in the order in which it trains them."""
    return [
        [row for step in plan.steps for rows in step.micro_batches[rank] for row in rows]
        for rank in range(plan.layout.dp)
    ]


def plan_text(plan: Plan) -> str:
    """The plan as it travels beside a batch: its fingerprint, then its JSON."""
    return f"{plan.fingerprint}\n{plan.to_json()}"


def checked_plan(
    text: str, index: SampleIndex, layout: ParallelLayout, options: PlanOptions
) -> Plan:
    """The plan of a text, if it is whole and made for this batch, layout and options.

    Args:
        text: From `plan_text`.
        index: Of the batch.
        layout: Of the training job.
        options: Of the training job.

    Raises:
        PlanError: Says in a few words what does not fit.
    """
    fingerprint, _, plan_json = text.partition("\n")
    if hashlib.sha256(plan_json.encode()).hexdigest() != fingerprint:
        raise PlanError("its fingerprint does not fit")
    plan = Plan.from_json(plan_json)
    for name, theirs, ours in (
        ("layout", plan.layout.to_dict(), layout.to_dict()),
        ("options", plan.options.to_dict(), options.to_dict()),
    ):
        different = [key for key in ours if theirs.get(key) != ours[key]]
        if different:
            values = ", ".join(f"{key}={theirs.get(key)!r}" for key in different)
            raise PlanError(f"it was made for another {name} ({values})")
    for column in INDEX_FIELDS:
        if not np.array_equal(getattr(plan.index, column), getattr(index, column)):
            raise PlanError(f"its {column} are not those of the batch")
    try:
        plan.check()
    except PlanError:
        raise
    except NOT_A_PLAN as error:  # the fingerprint fits, but something else wrote it
        raise PlanError(f"its values are none of a plan ({error!r})") from error
    return plan

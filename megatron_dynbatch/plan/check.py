"""Every guarantee of a plan, verified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import most_response_rows, padded_length
from megatron_dynbatch.plan.denominators import loss_denominator, sample_denominators
from megatron_dynbatch.plan.oversize import oversize_rows
from megatron_dynbatch.plan.packing.decreasing import best_fit_decreasing
from megatron_dynbatch.plan.plan_data import PlanData
from megatron_dynbatch.plan.step_plan import StepPlan
from megatron_dynbatch.wording import counted


def check_plan(plan: PlanData) -> None:
    """Raise `PlanError` naming the first guarantee that the plan breaks, and where."""
    _check_coverage(plan)
    step_of_sample = np.full(len(plan.index.total_lengths), -1, dtype=np.int64)
    for number, step in enumerate(plan.steps):
        step_of_sample[step.samples] = number
    _check_whole(plan.index.rollout_indices, step_of_sample, plan, "rollout")
    if plan.options.loss_reduction == "group":
        _check_whole(plan.index.group_indices, step_of_sample, plan, "prompt group")
    caps = _caps(plan)
    _check_oversize(plan)
    for number, step in enumerate(plan.steps):
        _check_counts(plan, number, step)
        _check_micro_batches(plan, number, step, caps)
        _check_num_dummies(plan, number, step, caps)
        _check_denominators(plan, number, step)
    _check_sample_denoms(plan)


def _check_coverage(plan: PlanData) -> None:
    """Each sample is in one micro-batch of one step, or carried, or dropped."""
    num_samples = len(plan.index.total_lengths)
    places = [step.samples for step in plan.steps]
    places += [np.asarray(plan.carried, np.int64), np.asarray(plan.dropped, np.int64)]
    rows = np.concatenate(places)
    bad = rows[(rows < 0) | (rows >= num_samples)]
    if bad.size:
        raise PlanError(f"plan: row {int(bad[0])} does not exist, the batch has {num_samples}")
    counts = np.bincount(rows, minlength=num_samples)
    wrong = np.flatnonzero(counts != 1)
    if wrong.size:
        row = int(wrong[0])
        raise PlanError(
            f"plan: sample {row} (rollout {int(plan.index.rollout_ids[row])}) is placed "
            f"{int(counts[row])} times; each sample belongs to exactly one micro-batch, or is "
            "carried or dropped"
        )
    if plan.carried and plan.options.leftover != "carry":
        raise PlanError(
            f"plan: sample {plan.carried[0]} is carried under leftover {plan.options.leftover!r}"
        )


def _check_whole(
    units: NDArray[np.int64], step_of_sample: NDArray[np.int64], plan: PlanData, word: str
) -> None:
    """No unit (rollout or prompt group) has planned samples in two steps or left over."""
    placed = np.ones(len(units), dtype=bool)
    if plan.options.oversize == "drop":
        placed[list(plan.oversize)] = False
    first = np.full(int(units.max()) + 1, -2, dtype=np.int64)
    first[units[placed][::-1]] = step_of_sample[placed][::-1]
    cut = np.flatnonzero(placed & (first[units] != step_of_sample))
    if cut.size:
        row = int(cut[0])
        raise PlanError(
            f"plan: {word} {int(units[row])} (in order of appearance) is cut: its first sample is "
            f"in step {int(first[units[row]])}, sample {row} in step {int(step_of_sample[row])} "
            "(-1: in none)"
        )


@dataclass(frozen=True)
class _Cap:
    """What a micro-batch may hold of something."""

    what: str
    per_sample: NDArray[np.int64]
    limit: int


def _caps(plan: PlanData) -> list[_Cap]:
    options, layout, index = plan.options, plan.layout, plan.index
    caps: list[_Cap] = []
    capacity = options.capacity(layout)
    if capacity is not None:
        lengths = padded_length(index.total_lengths, layout)
        caps.append(_Cap("tokens as laid out", lengths, capacity))
    logit_capacity = options.logit_capacity(layout)
    if logit_capacity is not None:
        rows = most_response_rows(index.total_lengths, index.response_lengths, layout)
        caps.append(_Cap("response rows of logits per GPU", rows, logit_capacity))
    if options.micro_batch_size is not None:
        ones = np.ones(len(index.total_lengths), dtype=np.int64)
        caps.append(_Cap("samples", ones, options.micro_batch_size))
    return caps


def _check_oversize(plan: PlanData) -> None:
    expected = oversize_rows(plan.index, plan.layout, plan.options).tolist()
    if list(plan.oversize) != expected:
        raise PlanError(f"plan: oversize samples are {expected}, reported {list(plan.oversize)}")
    planned = set(expected) - set(plan.dropped) - set(plan.carried)
    if planned and plan.options.oversize != "alone":
        raise PlanError(
            f"plan: sample {min(planned)} is longer than a micro-batch may be and is planned "
            f"under oversize {plan.options.oversize!r}"
        )


def _check_counts(plan: PlanData, number: int, step: StepPlan) -> None:
    """dp ranks with the same count each, one that Megatron's schedule accepts."""
    if len(step.micro_batches) != plan.layout.dp:
        raise PlanError(
            f"plan: step {number} has {counted(len(step.micro_batches), 'DP rank')}, the layout "
            f"{plan.layout.dp}"
        )
    for rank, micro_batches in enumerate(step.micro_batches):
        if len(micro_batches) != step.num_microbatches:
            raise PlanError(
                f"plan: step {number}: DP rank {rank} has "
                f"{counted(len(micro_batches), 'micro-batch')}, rank 0 has "
                f"{step.num_microbatches}; the count must be equal"
            )
    if not plan.layout.admits(step.num_microbatches):
        raise PlanError(
            f"plan: step {number} has {counted(step.num_microbatches, 'micro-batch')} per rank; "
            f"with pp={plan.layout.pp}, vpp={plan.layout.vpp} and group {plan.layout.group} the "
            f"schedule needs {plan.layout.next_admissible(step.num_microbatches)}"
        )


def _check_micro_batches(plan: PlanData, number: int, step: StepPlan, caps: list[_Cap]) -> None:
    """Caps as laid out; an oversize sample is alone."""
    for cap in caps:
        amounts = cap.per_sample.tolist()
        for rank, micro_batches in enumerate(step.micro_batches):
            for k, rows in enumerate(micro_batches):
                total = sum([amounts[row] for row in rows])
                if total > cap.limit and len(rows) > 1:
                    raise PlanError(
                        f"plan: step {number}, DP rank {rank}, micro-batch {k}: samples "
                        f"{list(rows)} take {total} {cap.what}, the cap is {cap.limit}"
                    )


def _check_num_dummies(plan: PlanData, number: int, step: StepPlan, caps: list[_Cap]) -> None:
    """No dummy that splitting or a smaller count would have avoided."""
    dp, count = plan.layout.dp, step.num_microbatches
    wanted = max(0, dp * count - step.num_samples)
    if step.num_dummies != wanted:
        raise PlanError(
            f"plan: step {number} has {counted(step.num_dummies, 'dummy micro-batch')}, "
            f"{dp} x {count} micro-batches for {counted(step.num_samples, 'sample')} need {wanted}"
        )
    smaller = next((m for m in range(count - 1, 0, -1) if plan.layout.admits(m)), None)
    if wanted == 0 or smaller is None or len(caps) != 1:
        return
    needed = len(best_fit_decreasing(caps[0].per_sample[step.samples], caps[0].limit))
    if needed <= dp * smaller:
        raise PlanError(
            f"plan: step {number} has {counted(step.num_dummies, 'dummy')} at "
            f"{counted(count, 'micro-batch')} per rank, though {smaller} would hold its samples"
        )


def _check_denominators(plan: PlanData, number: int, step: StepPlan) -> None:
    rows = step.samples
    expected = {
        "step_global_batch_size": int(np.unique(plan.index.rollout_indices[rows]).size),
        "loss_denominator": loss_denominator(plan.index, rows, plan.options),
        "num_trained_tokens": int(plan.index.mask_sums[rows].sum()),
    }
    for name, value in expected.items():
        if getattr(step, name) != value:
            raise PlanError(
                f"plan: step {number}: {name} is {getattr(step, name)!r}, its samples say {value}"
            )


def _check_sample_denoms(plan: PlanData) -> None:
    rows = np.concatenate([np.zeros(0, np.int64), *(step.samples for step in plan.steps)])
    expected = sample_denominators(plan.index, rows, plan.options)
    if plan.sample_denoms.dtype != expected.dtype or len(plan.sample_denoms) != len(expected):
        raise PlanError(
            f"plan: sample_denoms must be {expected.dtype}[{len(expected)}], is "
            f"{plan.sample_denoms.dtype}[{len(plan.sample_denoms)}]"
        )
    wrong = np.flatnonzero(plan.sample_denoms != expected)
    if wrong.size:
        row = int(wrong[0])
        raise PlanError(
            f"plan: the denominator of sample {row} is {plan.sample_denoms[row]}, under "
            f"{plan.options.loss_reduction!r} it is {expected[row]}"
        )

"""The same step cut up in other ways, for `verify --model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from megatron_dynbatch.plan import ParallelLayout, Plan, StepPlan, padded_length

if TYPE_CHECKING:
    from megatron_dynbatch.rollouts import Sample
    from megatron_dynbatch.steps import Step

type Ranks = list[list[tuple[int, ...]]]
"""[dp] lists of micro-batches: the sample rows of each."""

EXTRA_DUMMIES = 2


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        name: For the table.
        step: What every rank runs; micro-batches as [dp][M] rows.
        is_alone: Whether each sample is by itself, and the model is told of no packing.
        changed: Whether it splits the samples in another way than the run it is compared with.
    """

    name: str
    step: StepPlan
    is_alone: bool = False
    changed: bool = True


def variants(plan: Plan, step: StepPlan, capacity: int) -> list[Variant]:
    """Each sample alone, the plan twice, another packing, and the plan with dummies.

    Args:
        plan: Of the batch.
        step: The step, as the training would run it.
        capacity: Laid-out tokens that a micro-batch may hold.
    """
    alone = _arranged(step, [[(row,) for m in rank for row in m] for rank in _ranks(step)], plan)
    other = _other_packing(step, plan, capacity)
    dummies = plan.layout.next_admissible(step.num_microbatches + EXTRA_DUMMIES)
    padded = [[()] + rank + [()] * (dummies - len(rank) - 1) for rank in _ranks(step)]
    packs = _packs(step)
    return [
        Variant("each alone", alone, is_alone=True),
        Variant("the plan", step, changed=packs != _packs(alone)),
        Variant("the plan again", step),
        Variant("another packing", other, changed=_packs(other) not in (packs, _packs(alone))),
        Variant("more dummies", _arranged(step, padded, plan)),
    ]


def _ranks(step: StepPlan) -> Ranks:
    return [list(rank) for rank in step.micro_batches]


def _packs(step: StepPlan) -> set[frozenset[int]]:
    """Which samples are together."""
    return {frozenset(rows) for rank in step.micro_batches for rows in rank if rows}


def _arranged(step: StepPlan, ranks: Ranks, plan: Plan) -> StepPlan:
    """The step with these micro-batches, as many on every rank as the schedule accepts."""
    count = plan.layout.next_admissible(max(len(rank) for rank in ranks))
    filled = [(*rank, *[()] * (count - len(rank))) for rank in ranks]
    return replace(step, micro_batches=tuple(filled))


def _other_packing(step: StepPlan, plan: Plan, capacity: int) -> StepPlan:
    """Other neighbours, on other ranks; the first try of some that is neither plan nor alone."""
    rows = step.samples.tolist()
    lengths = {row: int(padded_length(int(plan.index.total_lengths[row]), plan.layout))
               for row in rows}  # fmt: skip
    longest = max(lengths.values())
    known = (_packs(step), {frozenset([row]) for row in rows})
    found = step
    for seed in range(4):
        for limit in (capacity, max(capacity // 2, longest), longest):
            order = Random(seed).sample(rows, len(rows))
            packs = _first_fit(order, lengths, limit)
            # Whoever had the first sample has the last one now.
            packs.sort(key=lambda pack: -min(pack))
            found = _arranged(step, [packs[r :: plan.layout.dp] for r in range(plan.layout.dp)],
                              plan)  # fmt: skip
            if _packs(found) not in known:
                return found
    return found


def _first_fit(
    rows: Sequence[int], lengths: Mapping[int, int], limit: int
) -> list[tuple[int, ...]]:
    packs: list[list[int]] = []
    for row in rows:
        for pack in packs:
            if lengths[row] + sum(lengths[other] for other in pack) <= limit:
                pack.append(row)
                break
        else:
            packs.append([row])
    return [tuple(pack) for pack in packs]


def as_step(like: Step, samples: Mapping[int, Sample], variant: Variant, width: int | None) -> Step:
    """The variant as a step that hooks and scripts can run.

    Args:
        like: The open step.
        samples: Plan row → sample, of all ranks.
        variant: What to run.
        width: Laid-out tokens of a micro-batch, or None for each its own length.
    """
    from megatron_dynbatch.steps import Step

    return Step(
        replace(like.plan, steps=(variant.step,)),
        0,
        like.batch_id,
        dp_rank=like.dp_rank,
        cp_rank=like.cp_rank,
        samples=samples,
        width=width,
        device=like.device,
    )


def token_weights(plan: Plan, row: int, samples: Mapping[int, Sample]) -> list[float]:
    """w = m/d of each response token of a sample (docs/semantics.md), counted anew from the masks.

    Args:
        plan: Gives the reduction and which samples belong together.
        row: The sample.
        samples: Plan row → sample of the whole step.
    """
    index, options = plan.index, plan.options
    own = samples[row].loss_mask
    if options.loss_reduction == "token":
        denominator = 1.0
    elif options.loss_reduction == "constant":
        denominator = float(options.loss_constant or 1.0)
    elif options.loss_reduction == "sample":
        denominator = float(own.sum())
    else:
        by_group = options.loss_reduction == "group"
        of = index.group_indices if by_group else index.rollout_indices
        denominator = float(sum(s.loss_mask.sum() for r, s in samples.items() if of[r] == of[row]))
    return [float(m) / denominator if m else 0.0 for m in own]


def can_be_plain(layout: ParallelLayout) -> bool:
    """Whether a rank has the whole model and whole samples: no schedule is needed then."""
    return layout.tp == layout.cp == layout.pp == 1

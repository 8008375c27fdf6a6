"""What each run of `verify` really changed, and which change a deviation comes from.

A run that is meant to vary something need not: three short samples under a large cap stay one
micro-batch, a second rank may have none of them. What a run changed is read off the plan that it
trained by; a run that changed nothing proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_dynbatch.cli.verify_cells import Cell, Outcome, Split
from megatron_dynbatch.rollouts import Sample

type Factors = frozenset[str]
"""Kinds of change, of `verify_result.KINDS`."""

MISSED = {
    "packing": "every run has the micro-batches of the first; give a step two samples at least",
    "siblings": "no run has two samples of one rollout in different micro-batches; give rollouts "
    "whose samples are as long as the longest one",
    "dp": "no run has samples of a step on two data-parallel ranks; give a step two samples at "
    "least",
    "cp": "no run has trained tokens on two context-parallel ranks; give longer responses",
    "masked": "no run with them succeeded",
    "twice": "no run with them succeeded",
}
"""Why a kind of change was not tested, and what would test it."""


def factors(cell: Cell, outcome: Outcome, reference: Outcome) -> Factors:
    """What this run changed against the first one."""
    found = cell.kinds & {"masked", "twice"}
    pairs = zip(outcome.splits, reference.splits, strict=False)
    if any(_num_micro_batches(ours) != _num_micro_batches(theirs) for ours, theirs in pairs):
        found |= {"packing"}
    if any(sum(any(rank) for rank in split) > 1 for split in outcome.splits):
        found |= {"dp"}
    if any(_is_trained_on_two(step) for step in outcome.trained):
        found |= {"cp"}
    return found


def _num_micro_batches(split: Split) -> int:
    return sum(bool(rows) for rank in split for rows in rank)


def _is_trained_on_two(step: Mapping[tuple[int, int], int]) -> bool:
    """Whether two context-parallel ranks of one data-parallel rank have trained tokens."""
    trained = [dp for (dp, _), tokens in step.items() if tokens]
    return len(trained) > len(set(trained))


def separates_siblings(split: Split, batch: Sequence[Sample]) -> bool:
    """Whether two samples of one rollout are in different micro-batches."""
    place: dict[int, tuple[int, int]] = {}
    for dp, rank in enumerate(split):
        for k, rows in enumerate(rank):
            for row in rows:
                rollout = batch[row].rollout_id
                if rollout is not None and place.setdefault(rollout, (dp, k)) != (dp, k):
                    return True
    return False


def has_siblings(batch: Sequence[Sample]) -> bool:
    """Whether a rollout of the batch has two samples."""
    ids = [s.rollout_id for s in batch if s.rollout_id is not None]
    return len(ids) > len(set(ids))


def causes(changed: Mapping[str, Factors], wrong: Sequence[str]) -> list[Factors]:
    """The fewest changes together that each deviation comes from.

    Args:
        changed: What each run changed.
        wrong: The runs that deviate.

    Returns:
        Sets of changes: one change alone where the runs tell it apart, several where they deviate
        only together, or where no run has one without the other.
    """
    failed = {changed[name] for name in wrong}
    held = {found for name, found in changed.items() if name not in wrong}
    smallest = [f for f in failed if not any(other < f for other in failed)]
    found = []
    for together in smallest:
        cleared = frozenset().union(*(h for h in held if h < together))
        found.append(together - cleared or together)
    # A wrong split shows under every layout too; only what it does not explain is named.
    if any(cause == {"packing"} for cause in found):
        found = [c for c in found if not c & {"dp", "cp"}]
    return list(dict.fromkeys(found))

"""Batches that train nothing are said, and are an error when there are several in a row."""

from __future__ import annotations

import numpy as np

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.output import progress
from megatron_dynbatch.rollouts import RolloutDataError
from megatron_dynbatch.steps.config import MOST_EMPTY_BATCHES
from megatron_dynbatch.steps.loaded_batch import LoadedBatch


class EmptyBatches:
    """Counts them, alike on every rank.

    Args:
        most_in_a_row: At this many in a row it is an error.

    Raises:
        OptionError: It is less than 1.
    """

    def __init__(self, most_in_a_row: int = MOST_EMPTY_BATCHES) -> None:
        if most_in_a_row < 1:
            raise OptionError(
                f"--max-empty-batches {most_in_a_row}: give a number of batches, 1 or more"
            )
        self._most = most_in_a_row
        self._in_a_row: list[int] = []

    def look_at(self, batch: LoadedBatch, *, says: bool) -> None:
        """Looks at a batch before its first step.

        Args:
            batch: As all ranks have it, present.
            says: Whether this rank says what it finds.

        Raises:
            RolloutDataError: There are too many in a row.
        """
        why = reason(batch)
        if why is None:
            if not batch.carried or _trains(batch):  # one that is carried whole says nothing
                self._in_a_row.clear()
            return
        self._in_a_row.append(batch.batch_id)
        if len(self._in_a_row) >= self._most:
            numbers = ", ".join(map(str, self._in_a_row))
            raise RolloutDataError(
                f"rollout batch{'es' if self._most > 1 else ''} {numbers} "
                f"train{'' if self._most > 1 else 's'} nothing ({why} in the last one): look at "
                "the loss masks and policy versions that the rollout side gives, and at "
                "--max-staleness and --oversize; --max-empty-batches lets more of them pass"
            )
        if says:
            progress(f"rollout batch {batch.batch_id} trains nothing: {why}")


def reason(batch: LoadedBatch) -> str | None:
    """Why a batch trains nothing; None if it trains, or is kept for the next one."""
    plan, stale = batch.plan, batch.announcement.dropped_rollouts
    if batch.carried or _trains(batch):
        return None
    parts = []
    if plan is not None:
        num_masked = sum(step.step_global_batch_size for step in plan.steps)
        num_dropped = int(np.unique(plan.index.rollout_indices[list(plan.dropped)]).size)
        if num_masked:
            parts.append(f"{_rollouts(num_masked)} without a trained token (masks are all zero)")
        if num_dropped:
            parts.append(f"{_rollouts(num_dropped)} dropped (too long, or left over)")
    if stale:
        parts.append(f"{_rollouts(stale)} dropped as stale")
    return ", ".join(parts)


def _trains(batch: LoadedBatch) -> bool:
    plan = batch.plan
    return plan is not None and any(step.num_trained_tokens for step in plan.steps)


def _rollouts(count: int) -> str:
    return f"{count} rollout{'s' if count > 1 else ''}"

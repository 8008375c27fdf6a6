"""Batches that are no longer there: which a resume would need, and how they go."""

from __future__ import annotations

from megatron_dynbatch.output import progress
from megatron_dynbatch.rollouts import RolloutDataError, RolloutSource
from megatron_dynbatch.rollouts.kept import is_deleted
from megatron_dynbatch.steps.cursor import Cursor


def missing_batches(source: RolloutSource, cursor: Cursor) -> list[int]:
    """Deleted batches that training from a cursor on would read, ascending; empty if none."""
    carried = {batch for batch, _ in cursor.carried}
    missing = [batch for batch in sorted(carried) if is_deleted(source, batch)]
    # Batches go in order, so those behind the first one that is kept are there.
    batch_id = cursor.batch_id
    while is_deleted(source, batch_id):
        missing.append(batch_id)
        batch_id += 1
    return missing


def delete_trained(source: RolloutSource, cursor: Cursor, keep_batches: int) -> None:
    """Delete what no resume from `cursor` or a later one needs, but for the last few batches.

    A failure is a line: the next completed checkpoint tries it again.
    """
    end = max(0, cursor.first_batch - keep_batches)
    try:
        source.delete_before(end)
    except (OSError, RolloutDataError) as error:
        progress(
            f"rollout batches before {end} could not be deleted ({error}); it is tried again "
            "after the next checkpoint"
        )

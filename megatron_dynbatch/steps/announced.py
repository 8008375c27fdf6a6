"""What rank 0's announcement of a batch says, on every rank, before a sample is read."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_dynbatch.plan import Plan
from megatron_dynbatch.steps.agreement import steps_digest
from megatron_dynbatch.steps.cursor import Cursor
from megatron_dynbatch.steps.prefetch import OpenBatch


def announced_batch(cursor: Cursor, message: dict[str, Any]) -> OpenBatch:
    """The batch at a cursor without its samples.

    Args:
        cursor: Where the batch is opened.
        message: Of `Announcer.announce`.
    """
    batch = OpenBatch(cursor.batch_id, message, None, [], {}, {}, cursor.step_index)
    batch.dropped_rollouts = message.get("dropped_rollouts", 0)
    batch.fingerprint = message["kind"]
    if message["kind"] != "plan":
        return batch
    plan = batch.plan = Plan.from_json(message["plan"])
    batch.origins = [(int(b), int(row)) for b, row in message["origins"]]
    # All that the boundary needs is known now, so that it does not take long.
    batch.carried = tuple(batch.origins[row] for row in plan.carried)
    rollouts = plan.index.rollout_indices[list(plan.dropped)]
    batch.dropped_rollouts += int(np.unique(rollouts).size)
    batch.steps_digest = steps_digest(plan, batch.origins)
    batch.fingerprint = plan.fingerprint
    return batch


def cursor_after(cursor: Cursor, batch: OpenBatch) -> Cursor:
    """The cursor at the start of the batch that follows."""
    stale = batch.message["stale_rollouts"]
    return cursor.after_batch(batch.carried, batch.dropped_rollouts, stale)

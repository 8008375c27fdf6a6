"""`LoadedBatch`: an announced batch as one rank has it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megatron_dynbatch.plan import Plan
from megatron_dynbatch.rollouts import RolloutSource, Sample
from megatron_dynbatch.steps.announcement import Announcement, Origin, Origins, rows_by_batch
from megatron_dynbatch.steps.config import FeedConfig
from megatron_dynbatch.steps.cursor import Cursor
from megatron_dynbatch.steps.digests import sample_digests, steps_digest
from megatron_dynbatch.steps.read_rows import (
    check_log_probs,
    read_rows,
    rows_of_rank,
    sample_of_lengths,
)
from megatron_dynbatch.steps.step import Step


@dataclass
class LoadedBatch:
    """A batch as one rank has it.

    Attributes:
        batch_id: The rollout batch.
        announcement: What rank 0 said of it.
        plan: None if nothing of it is trained.
        first_step: The step of the plan at which this run begins with the batch.
        samples: Plan row → sample, for the rows that this rank still trains.
        fingerprint: Of the plan; without one, what was announced.
        carried: (batch, row) of samples that are kept for the next batch.
        dropped_rollouts: Rollouts that are left out.
        steps_digest: Hash of which samples each step has; "" if nothing of the batch is trained.
        stamps: What tells each batch that the plan draws on from any other of its number.
        digests: What was read → hash of what this rank has of it.
        steps: Step index → step, as far as they were made.
    """

    batch_id: int
    announcement: Announcement
    plan: Plan | None
    first_step: int
    samples: dict[int, Sample]
    fingerprint: str
    carried: tuple[Origin, ...] = ()
    dropped_rollouts: int = 0
    steps_digest: str = ""
    stamps: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)

    @property
    def origins(self) -> Origins:
        """(batch, row) of each plan row."""
        return self.announcement.origins

    def cursor_after(self, cursor: Cursor) -> Cursor:
        """The cursor at the start of the batch that follows."""
        stale = self.announcement.stale_rollouts
        return cursor.after_batch(self.carried, self.dropped_rollouts, stale)


def load_batch(
    source: RolloutSource, cursor: Cursor, announcement: Announcement, config: FeedConfig
) -> LoadedBatch:
    """Read this rank's rows of a batch; all that the step boundary needs is computed here.

    Args:
        source: Where rollout batches come from.
        cursor: Where the batch is opened.
        announcement: What rank 0 said of it.
        config: Says which rows and fields are this rank's.

    Raises:
        RolloutDataError: A sample is damaged, or not what was planned, or lacks log-probs.
    """
    said = announcement
    if said.kind != "plan":
        return LoadedBatch(
            cursor.batch_id, said, None, cursor.step_index, {}, said.kind,
            dropped_rollouts=said.dropped_rollouts,
        )  # fmt: skip
    plan = Plan.from_json(said.plan)
    stamps = tuple(source.stamp(b) for b in sorted(rows_by_batch(said.origins)))
    rows = rows_of_rank(plan, config.dp_rank, cursor.step_index)
    if config.lengths_only:
        samples = {row: sample_of_lengths(plan.index, row) for row in rows}
        digests = {}
    else:
        samples = read_rows(source, plan.index, said.origins, rows, config.fields)
        digests = sample_digests(plan, samples, all_fields=config.fields is None)
    if config.staleness.policy == "train" and said.stale_rollouts:
        check_log_probs(samples, said.origins, config.fields)
    dropped = np.unique(plan.index.rollout_indices[list(plan.dropped)]).size
    return LoadedBatch(
        cursor.batch_id,
        said,
        plan,
        cursor.step_index,
        samples,
        plan.fingerprint,
        carried=tuple(said.origins[row] for row in plan.carried),
        dropped_rollouts=said.dropped_rollouts + int(dropped),
        steps_digest=steps_digest(plan, said.origins),
        stamps=stamps,
        digests=digests,
    )

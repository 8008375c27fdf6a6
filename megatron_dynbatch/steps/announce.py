"""Rank 0's part: which samples of a batch are trained, and by what plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from megatron_dynbatch.errors import OptionError, ResumeError
from megatron_dynbatch.handshake import checked_plan
from megatron_dynbatch.output import progress
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanError, PlanOptions, make_plan
from megatron_dynbatch.rollouts import RolloutDataError, RolloutSource, SampleIndex
from megatron_dynbatch.steps.announcement import Announcement, Origin, rows_by_batch
from megatron_dynbatch.steps.cursor import Cursor
from megatron_dynbatch.wording import counted

STALE_POLICIES = ("drop", "train")


@dataclass(frozen=True)
class Staleness:
    """How old the weights may be that sampled a rollout.

    The age of a rollout in batch b is b − its policy version, in batches. Rollouts of unknown
    version are taken.

    Attributes:
        limit: Largest age; None: any.
        policy: What happens to older ones: ``drop`` (counted), or ``train`` (the loss must weigh
            them; they must have `rollout_log_probs`).
    """

    limit: int | None = None
    policy: Literal["drop", "train"] = "drop"

    def __post_init__(self) -> None:
        if self.policy not in STALE_POLICIES:
            raise OptionError(f"stale policy {self.policy!r}: one of {', '.join(STALE_POLICIES)}")
        if self.limit is not None and self.limit < 0:
            raise OptionError(f"maximum staleness is {self.limit}; it is a number of batches ≥ 0")

    def is_stale(self, index: SampleIndex, batch_id: int) -> np.ndarray:
        """bool [S], whether a sample's rollout is older than the limit when batch_id trains."""
        versions = index.policy_versions
        if self.limit is None:
            return np.zeros(len(index), bool)
        too_old = (versions >= 0) & (batch_id - versions > self.limit)
        # A rollout is as old as its oldest sample.
        per_rollout = np.bincount(index.rollout_indices, too_old, index.num_rollouts) > 0
        return per_rollout[index.rollout_indices]


class Announcer:
    """Plans the batch at a cursor.

    Args:
        source: Where rollout batches come from.
        layout: Of the training job.
        options: Of the training job.
        staleness: Which rollouts are too old.
    """

    def __init__(
        self,
        source: RolloutSource,
        layout: ParallelLayout,
        options: PlanOptions,
        staleness: Staleness,
    ) -> None:
        self._source = source
        self._layout = layout
        self._options = options
        self._staleness = staleness
        self._said: set[str] = set()

    def announce(self, cursor: Cursor, state: str) -> Announcement:
        """What every rank must know of the batch at a cursor, or of the end.

        Args:
            cursor: Where training stands.
            state: Of the batch there: "present" or "end".

        Raises:
            RolloutDataError: The rollouts ended before they began.
            ResumeError: The cursor carries rows that its batch does not have.
            PlanError: The batch cannot be planned as asked.
        """
        carried = list(cursor.carried)
        if state == "end" and cursor.batch_id == 0:
            raise RolloutDataError(f"{self._source} was closed without a single rollout")
        if state == "end" and not carried:
            return Announcement("end")
        index, origins = self._index(cursor, state == "present")
        is_stale = self._staleness.is_stale(index, cursor.batch_id)
        stale = int(np.unique(index.rollout_indices[is_stale]).size)
        dropped = stale if self._staleness.policy == "drop" else 0
        if dropped:
            kept = np.flatnonzero(~is_stale)
            index, origins = index.take(kept), [origins[row] for row in kept]
            progress(
                f"rollout batch {cursor.batch_id}: {counted(stale, 'rollout')} dropped, older "
                f"than {counted(self._staleness.limit or 0, 'batch')}"
            )
        if not origins:
            return Announcement("nothing", stale_rollouts=stale, dropped_rollouts=dropped)
        is_whole = state == "present" and not carried and not dropped
        plan = self._rollout_sides_plan(cursor.batch_id, index) if is_whole else None
        if plan is None:
            plan = make_plan(index, self._layout, self._options, last=state == "end")
            plan.check()
        return Announcement(
            "plan", plan.to_json(), tuple(origins), self._identity(origins), stale, dropped
        )

    def _identity(self, origins: list[Origin]) -> dict[str, Any]:
        stamps = {b: self._source.content_stamp(b) for b in sorted(rows_by_batch(origins))}
        return {
            "source_id": self._source.source_id(),
            "source_name": str(self._source),
            "stamps": stamps,
        }

    def _index(self, cursor: Cursor, is_present: bool) -> tuple[SampleIndex, list[Origin]]:
        """Of the carried samples and the batch's own, and where each comes from."""
        origins = list(cursor.carried)
        parts = [self._carried(batch, rows) for batch, rows in rows_by_batch(origins).items()]
        if is_present:
            own = self._source.index(cursor.batch_id)
            parts.append(own)
            origins += [(cursor.batch_id, row) for row in range(len(own))]
        return SampleIndex.concat(parts), origins

    def _carried(self, batch: int, rows: list[int]) -> SampleIndex:
        index = self._source.index(batch)
        if max(rows) >= len(index):
            raise ResumeError(
                f"the checkpoint carries row {max(rows)} of rollout batch {batch}, but in "
                f"{self._source} that batch has rows 0 to {len(index) - 1}: resume with the "
                "rollouts that it was trained on"
            )
        return index.take(rows)

    def _rollout_sides_plan(self, batch_id: int, index: SampleIndex) -> Plan | None:
        text = self._source.plan_json(batch_id)
        if text is None:
            self._say_once("came without a plan", batch_id)
            return None
        try:
            return checked_plan(text, index, self._layout, self._options)
        except PlanError as error:
            self._say_once(f"has a plan that is not used: {error}", batch_id)
            return None

    def _say_once(self, what: str, batch_id: int) -> None:
        if what not in self._said:
            self._said.add(what)
            progress(f"rollout batch {batch_id} {what}; rank 0 plans it (said once)")

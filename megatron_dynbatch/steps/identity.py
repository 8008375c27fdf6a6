"""Are these the rollouts that the checkpoint was trained on?

Invariants (asserted by the tests): nothing of another source or of a changed batch is trained;
batches that are appended, copied or moved with their directory's id need no word.
"""

from __future__ import annotations

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.output import progress
from megatron_dynbatch.rollouts import RolloutDataError, RolloutSource
from megatron_dynbatch.rollouts.content import are_comparable
from megatron_dynbatch.steps.cursor import Cursor, changed_batch


class ResumeCheck:
    """Holds what is there now against what a cursor knows of it; on rank 0.

    Args:
        cursor: Of the checkpoint.
        source: Where rollout batches come from.
        moved: Whether the source may be another one, if its batches are the same.
    """

    def __init__(self, cursor: Cursor, source: RolloutSource, *, moved: bool) -> None:
        self._cursor = cursor
        self._source = source
        self._moved = moved
        self._id = ""
        self._left = dict(cursor.stamps)

    def check(self) -> None:
        """Compare what can be seen now and was not compared yet.

        Raises:
            ResumeError: Another source, or a batch that was changed.
            RolloutDataError: The source, or a batch, is damaged.
        """
        if not self._id and (now := self._source.source_id()):
            self._id = now
            if self._cursor.source_id not in ("", now) and not self._moved:
                raise ResumeError(
                    f"the checkpoint was trained on {self._cursor.source_name} (id "
                    f"{self._cursor.source_id}), but {self._source} has the id {now}: these are "
                    "other rollouts; give the path of the old ones, or --rollouts-moved if the "
                    "same batches were written here; --finetune begins anew with any rollouts"
                )
        for batch_id, before in list(self._left.items()):
            if not _is_there(self._source, batch_id):
                continue
            now = self._source.content_stamp(batch_id, verify=True)
            if are_comparable(before, now):
                if before != now:
                    raise changed_batch(batch_id, before, now, str(self._source))
                del self._left[batch_id]

    def conclude(self) -> None:
        """Say what was not compared, when training goes on."""
        cursor = self._cursor
        if cursor.batch_id == 0 and cursor.step_index == 0:
            return
        if not cursor.source_id and not cursor.stamps:
            progress(
                "the checkpoint does not say on which rollouts it was trained (a version before "
                f"wrote it): {self._source} is not compared"
            )
        elif cursor.source_id and cursor.source_id != self._id:
            same = [batch for batch in cursor.stamps if batch not in self._left]
            progress(
                f"rollouts come from {self._source} (id {self._id or 'unknown'}) in the place of "
                f"{cursor.source_name} (id {cursor.source_id}); the same as then: batches {same}; "
                f"could not be compared: batches {list(self._left)}"
            )


def _is_there(source: RolloutSource, batch_id: int) -> bool:
    try:
        return source.state(batch_id) == "present"
    except RolloutDataError:  # deleted: where it is needed, reading it is an error that says so
        return False

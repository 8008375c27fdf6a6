"""Rollouts in the memory of one process: for synchronous reinforcement learning in one program.

With several ranks, each process has a queue of its own and must put the same batches in it; ranks
compare what they read before they train.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

from megatron_dynbatch.rollouts.batch import RolloutBatch
from megatron_dynbatch.rollouts.checked_paths import check_text
from megatron_dynbatch.rollouts.content import content_of_samples
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import SampleIndex, is_row
from megatron_dynbatch.rollouts.sample import Sample
from megatron_dynbatch.rollouts.source import BatchState
from megatron_dynbatch.rollouts.store import BatchStore, check_note_name
from megatron_dynbatch.wording import counted, short


class RolloutQueue:
    """A transport for threads of one process. Samples are handed on, not copied.

    Args:
        name: What it is called in errors.
        vocab_size: Token ids must be below it; None: not checked.
    """

    _named: ClassVar[dict[str, RolloutQueue]] = {}

    def __init__(self, name: str = "queue", *, vocab_size: int | None = None) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self._store: BatchStore[tuple[RolloutBatch, str | None]] = BatchStore(name)
        self._notes: dict[str, str] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str, *, vocab_size: int | None = None) -> RolloutQueue:
        """The queue of that name in this process (`--rollout-path queue:NAME`)."""
        queue = cls._named.setdefault(name, cls(name, vocab_size=vocab_size))
        queue._vocab_size = queue._vocab_size or vocab_size
        return queue

    def __repr__(self) -> str:
        return f"RolloutQueue({self._name!r})"

    def write(
        self,
        samples: Iterable[Sample],
        plan_json: str | None = None,
        *,
        parts: Sequence[Sequence[int]] | None = None,
        key: str | None = None,
    ) -> int:
        """Adds a batch; `parts` changes nothing here. See `RolloutTransport.write`.

        Raises:
            RolloutDataError: `validate_samples` rejects the samples, or the run is finished.
        """
        batch = RolloutBatch(samples, vocab_size=self._vocab_size)
        if plan_json is not None:
            check_text("the plan of the batch", plan_json)
        with self._lock:
            return self._store.add((batch, plan_json), key)

    def finish(self) -> int:
        """Closes the run; returns the number of batches.

        Raises:
            RolloutDataError: The run is finished already.
        """
        with self._lock:
            return self._store.finish()

    def is_there(self) -> bool:
        """Always: it is in this process."""
        return True

    def state(self, batch_id: int) -> BatchState:
        """See `RolloutSource.state`."""
        with self._lock:
            return self._store.state(batch_id)

    def index(self, batch_id: int) -> SampleIndex:
        """See `RolloutSource.index`."""
        return self._get(batch_id)[0].index

    def read(
        self, batch_id: int, rows: Sequence[int], fields: Collection[str] | None = None
    ) -> list[Sample]:
        """The samples as they were put in, with all fields."""
        batch = self._get(batch_id)[0]
        wrong = [n for n in rows if not is_row(n, len(batch))]
        if wrong:
            raise RolloutDataError(
                f"{self}: no row {short(wrong[0])}; batch {batch_id} has "
                f"{counted(len(batch), 'row')}"
            )
        return [batch[row] for row in rows]

    def stamp(self, batch_id: int) -> str:
        """Always "": each process has its own queue, and ranks compare what they read."""
        return ""

    def source_id(self) -> str:
        """The queue's name: it is the memory of a process, and ends with it."""
        return f"queue:{self._name}"

    def content_stamp(self, batch_id: int, *, verify: bool = False) -> str:
        """See `RolloutSource.content_stamp`."""
        return content_of_samples(self._get(batch_id)[0].samples)

    def plan_json(self, batch_id: int) -> str | None:
        """See `RolloutSource.plan_json`."""
        return self._get(batch_id)[1]

    def delete_before(self, batch_id: int) -> None:
        """Forgets all batches before `batch_id`."""
        with self._lock:
            self._store.delete_before(batch_id)

    def publish(self, name: str, text: str) -> None:
        """See `RolloutSource.publish`."""
        check_note_name(name)
        self._notes[name] = check_text(f"note {name!r}", text)

    def published(self, name: str) -> str | None:
        """See `RolloutSource.published`."""
        check_note_name(name)
        return self._notes.get(name)

    def _get(self, batch_id: int) -> tuple[RolloutBatch, str | None]:
        with self._lock:
            return self._store.get(batch_id)

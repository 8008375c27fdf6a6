"""Numbered batches, their end and their keys in memory: what transports without files keep."""

from __future__ import annotations

import operator
import re

from megatron_dynbatch.rollouts.checked_paths import check_text
from megatron_dynbatch.rollouts.errors import BatchDeleted, RolloutDataError
from megatron_dynbatch.rollouts.source import BatchState
from megatron_dynbatch.wording import counted, short

_NOTE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,99}")


class BatchStore[T]:
    """Batches 0, 1, 2… in the order in which they were added. Not locked.

    Args:
        name: What the store is called in errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._batches: list[T | None] = []
        self._keys: dict[str, int] = {}
        self._is_finished = False

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def is_finished(self) -> bool:
        """Whether no batch follows."""
        return self._is_finished

    def find(self, key: str | None) -> int | None:
        """The batch of that key, or None."""
        return None if key is None else self._keys.get(check_key(key))

    def add(self, batch: T, key: str | None) -> int:
        """Adds a batch, unless one of that key is there; returns its id.

        Raises:
            RolloutDataError: The run is finished.
        """
        if (found := self.find(key)) is not None:
            return found
        self._refuse_if_finished()
        self._batches.append(batch)
        if key is not None:
            self._keys[check_key(key)] = len(self._batches) - 1
        return len(self._batches) - 1

    def finish(self) -> int:
        """Closes the run; returns the number of batches.

        Raises:
            RolloutDataError: The run is finished already.
        """
        self._refuse_if_finished()
        self._is_finished = True
        return len(self._batches)

    def state(self, batch_id: int) -> BatchState:
        """See `RolloutSource.state`."""
        if batch_number(batch_id) >= len(self._batches):
            return "end" if self._is_finished else "absent"
        self.get(batch_id)
        return "present"

    def get(self, batch_id: int) -> T:
        """A batch.

        Raises:
            RolloutDataError: It was deleted, or never there.
        """
        if batch_number(batch_id) >= len(self._batches):
            raise RolloutDataError(f"{self._name}: there is no batch {batch_id}")
        batch = self._batches[batch_id]
        if batch is None:
            raise deleted_error(f"{self._name}, batch {batch_id}")
        return batch

    def delete_before(self, batch_id: int) -> None:
        """Forgets batches; their numbers and keys stay taken."""
        end = min(batch_id, len(self._batches))
        self._batches[:end] = [None] * end

    def _refuse_if_finished(self) -> None:
        if self._is_finished:
            raise RolloutDataError(
                f"{self._name}: the run is finished after {counted(len(self._batches), 'batch')}; "
                "start another one under a new name"
            )


def batch_number(batch_id: int) -> int:
    """`batch_id`, if it can be one.

    Raises:
        RolloutDataError: It is no integer, negative, or beyond 64 bits.
    """
    try:
        number = operator.index(batch_id)
    except TypeError as error:
        raise RolloutDataError(f"batch id {short(batch_id)} is no integer") from error
    if number < 0:
        raise RolloutDataError(
            f"batch id {short(number)} is negative; batches are numbered from 0"
        )
    if number >= 1 << 63:
        raise RolloutDataError(f"batch id {short(number)} does not fit in 64 bits")
    return number


def check_key(key: str) -> str:
    """`key`, if it can name a batch.

    Raises:
        RolloutDataError: It is empty, or no Unicode text.
    """
    if not check_text("the key of a batch", key):
        raise RolloutDataError(
            "the key of a batch is empty; leave it out or name what is in the batch"
        )
    return key


def check_note_name(name: str) -> None:
    """Raises RolloutDataError if a note cannot have that name."""
    if not isinstance(name, str) or not _NOTE_NAME.fullmatch(name):
        raise RolloutDataError(
            f"note name {short(name)}: use lower-case letters, digits, - and _, 100 at most"
        )


def deleted_error(what: str) -> BatchDeleted:
    """The error of reading a batch that retention deleted."""
    return BatchDeleted(
        f"{what} was deleted: a checkpoint that was completed lies beyond it; resume from that "
        "checkpoint or a later one, or keep more batches (--keep-batches)"
    )

"""Deleting batches that were trained. It goes on from wherever it was stopped, and stops nobody."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_dynbatch.output import progress
from megatron_dynbatch.rollouts.files import remove_file, write_text
from megatron_dynbatch.rollouts.leftovers import sweep
from megatron_dynbatch.rollouts.slots import DELETED, KEY, Slots

_MARK = "A completed checkpoint lies beyond this batch.\n"


class Retention:
    """Of one directory.

    Args:
        slots: Its batches.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._done: set[int] = set()
        self._said: set[int | None] = set()

    def delete_before(self, batch_id: int) -> None:
        """Deletes the samples of all batches before `batch_id`; their numbers and keys stay taken.

        What cannot be deleted now is tried again the next time; one line for each kind of failure.
        """
        try:
            numbers = self._slots.numbers()
        except OSError as error:
            self._say(f"batches before {batch_id}", error)
            return
        for number in numbers:
            if number < batch_id and number not in self._done:
                self._delete(number)
        sweep(self._slots.path)

    def _delete(self, number: int) -> None:
        folder = self._slots.folder(number)
        if folder.is_symlink():
            return
        state = self._slots.state(number)
        if state not in ("present", "deleted"):
            return
        try:
            if state == "present":
                try:
                    write_text(folder / DELETED, _MARK, "deletion-mark")
                except OSError:
                    if not (folder / DELETED).exists():  # empty it says the same
                        raise
            names = [name for name in sorted(os.listdir(folder)) if name not in (DELETED, KEY)]
        except OSError as error:
            self._say(f"batch {number}", error)
            return
        if all([self._is_removed(number, folder / name) for name in names]):
            self._done.add(number)

    def _is_removed(self, number: int, path: Path) -> bool:
        try:
            remove_file(path, "deletion")
        except OSError as error:
            self._say(f"batch {number}", error)
            return False
        return True

    def _say(self, what: str, error: OSError) -> None:
        if error.errno not in self._said:
            self._said.add(error.errno)
            progress(
                f"{what} in {self._slots.path} cannot be deleted ({error.strerror}); training goes "
                "on, and it is tried again after the next checkpoint (said once)"
            )

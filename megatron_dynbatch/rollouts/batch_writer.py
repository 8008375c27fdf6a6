"""The writing side of a rollout directory: a batch or the end appears as a whole, by one move."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable
from pathlib import Path

from megatron_dynbatch.rollouts.batch import RolloutBatch
from megatron_dynbatch.rollouts.checked_paths import own_text
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.files import (
    make_folder,
    move,
    new_file,
    remove_folder,
    sync,
    write_text,
)
from megatron_dynbatch.rollouts.hidden import held, hidden_name
from megatron_dynbatch.rollouts.leftovers import sweep
from megatron_dynbatch.rollouts.manifest import write_manifest
from megatron_dynbatch.rollouts.marker import DirectoryMarker
from megatron_dynbatch.rollouts.parquet_write import Parts, write_index, write_part
from megatron_dynbatch.rollouts.slots import END, INDEX, KEY, PLAN, Slots
from megatron_dynbatch.wording import counted

_ATTEMPTS = 5  # a folder is taken away by somebody who cleans up, which happens once in a while


def part_name(number: int) -> str:
    """File name of a part."""
    return f"part-{number:05d}.parquet"


class BatchWriter:
    """Of one directory.

    Args:
        slots: Its batches.
        marker: Its marker.
    """

    def __init__(self, slots: Slots, marker: DirectoryMarker) -> None:
        self._slots = slots
        self._marker = marker
        self._keys: dict[str, int] = {}
        self._num_keys_read = 0
        self._is_swept = False

    def batch_of_key(self, key: str) -> int | None:
        """The batch of that key, if it is among those that are there now."""
        if not self._marker.is_there():
            return None
        for number in self._slots.numbers():
            if number >= self._num_keys_read:
                self._note_key(number)
        return self._keys.get(key)

    def write(
        self, batch: RolloutBatch, division: Parts, plan_json: str | None, key: str | None
    ) -> int:
        """Writes a batch; see `RolloutDirectory.write`."""
        stamp = uuid.uuid4().hex

        def fill(slot: Path) -> None:
            for number, rows in enumerate(division.rows):
                with new_file(slot / part_name(number), "part") as file:
                    write_part(file, [batch[row] for row in rows], rows, stamp=stamp)
            with new_file(slot / INDEX, "index") as file:
                write_index(file, batch.samples, division.places, stamp)
            write_manifest(slot, stamp)
            if plan_json is not None:
                write_text(slot / PLAN, plan_json, "plan")
            if key is not None:
                write_text(slot / KEY, key, "key")

        return self._publish_filled(fill, key)

    def finish(self) -> int:
        """Writes the end; see `RolloutDirectory.finish`."""
        return self._publish_filled(
            lambda slot: write_text(slot / END, "No batch follows.\n", "end"), None
        )

    def _publish_filled(self, fill: Callable[[Path], None], key: str | None) -> int:
        """Fills a hidden folder and publishes it; again if somebody took the folder for dead."""
        if not self._marker.is_there():
            self._marker.create()
        for attempt in range(_ATTEMPTS):
            slot = self._slots.path / hidden_name()
            try:
                make_folder(slot, "slot")
                with held(slot):
                    self._sweep_once(slot)
                    fill(slot)
                    return self._publish(slot, key)
            except FileNotFoundError:
                if attempt + 1 == _ATTEMPTS or not self._slots.path.exists():
                    raise
            finally:
                remove_folder(slot, "slot-removal")  # a published one is no longer there
        raise AssertionError

    def _publish(self, slot: Path, key: str | None) -> int:
        """Renames a filled slot onto the next free number and returns that number."""
        sync(slot)
        batch_id = self._slots.next_number()
        while True:
            # Numbers are taken one after the other, so an end can only be just before this one.
            if batch_id > 0 and self._slots.state(batch_id - 1) == "end":
                raise RolloutDataError(
                    f"{self._slots.path}: the run is finished after "
                    f"{counted(batch_id - 1, 'batch')}; start another one in a new directory"
                )
            # Every batch before this number is there now, so none of the same key is missed.
            if key is not None and (found := self.batch_of_key(key)) is not None:
                return found
            try:
                move(slot, self._slots.folder(batch_id), "batch")
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # Another writer was faster, whether the listing shows it already or not.
                batch_id = max(batch_id + 1, self._slots.next_number())
                continue
            sync(self._slots.path)
            return batch_id

    def _note_key(self, number: int) -> None:
        key = own_text(self._slots.path, self._slots.folder(number).name, KEY)
        if key is not None:
            self._keys.setdefault(key, number)
        self._num_keys_read = number + 1

    def _sweep_once(self, slot: Path) -> None:
        """Cleans up after whoever wrote here before, by the time at which `slot` was made."""
        if not self._is_swept:
            self._is_swept = True
            sweep(self._slots.path, slot.stat().st_mtime)

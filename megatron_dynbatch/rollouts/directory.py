"""Rollouts as files: the default transport, on a local disk or a shared file system.

    DIR/dynbatch.json                      makes DIR a rollout directory, with the format's version
    DIR/notes/NAME                         what one side tells the other (layout, progress)
    DIR/batch-00000000/index.parquet       a batch: lengths and ids
                      /part-00000.parquet  its samples, one part per reader where it was planned
                      /manifest.json       checksums of their footers, and the batch's stamp
                      /plan.json           the plan that the rollout side made for it, if any
                      /key                 the writer's name for what is in it, if any
    DIR/batch-00000001/END                 no batch follows
    DIR/batch-00000002/DELETED             was trained, and a completed checkpoint lies beyond it

Invariants (asserted by the tests): a batch or the end of the run appears as a whole, by one rename
of a hidden directory onto the next free number, so that no reader sees a part, no two writers get
one number, and no batch comes after the end. A writer that dies leaves only a hidden directory.
Nothing depends on clocks.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from megatron_dynbatch.rollouts.batch import RolloutBatch
from megatron_dynbatch.rollouts.checked_paths import (
    check_text,
    checked_path,
    own_file,
    own_folder,
    own_text,
)
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.files import TEMPORARY, replace_text, sync, write_text
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.manifest import MANIFEST, read_manifest, write_manifest
from megatron_dynbatch.rollouts.marker import FORMAT_VERSION, DirectoryMarker
from megatron_dynbatch.rollouts.parquet_file import Stored
from megatron_dynbatch.rollouts.parquet_index import read_index, read_places
from megatron_dynbatch.rollouts.parquet_read import check_fields, read_part
from megatron_dynbatch.rollouts.parquet_write import Parts, new_file, write_index, write_part
from megatron_dynbatch.rollouts.sample import Sample
from megatron_dynbatch.rollouts.source import BatchState
from megatron_dynbatch.rollouts.store import batch_number, check_key, check_note_name, deleted_error

__all__ = ["FORMAT_VERSION", "RolloutDirectory"]

_INDEX = "index.parquet"
_PLAN = "plan.json"
_KEY = "key"
_END = "END"
_DELETED = "DELETED"
_NOTES = "notes"
type SlotState = BatchState | Literal["deleted"]

_BATCH_NAME = re.compile(r"batch-(\d{8,})")


class RolloutDirectory:
    """A directory of rollout batches, for any number of writers and readers.

    The directory is made by the first `write` or `publish`; a reader may be there before it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab_size: int | None = None,
        open_timeout: float = 10.0,
    ) -> None:
        """Names the directory; touches no file.

        Args:
            path: The directory.
            vocab_size: Token ids must be below it, written or read; None: not checked.
            open_timeout: Seconds for which a file that should be there is looked for again: a
                shared file system may show a directory before what is in it.
        """
        self.path = checked_path(path)
        self._vocab_size = vocab_size
        self._open_timeout = open_timeout
        self._marker = DirectoryMarker(self.path, _BATCH_NAME, open_timeout)
        self._keys: dict[str, int] = {}
        self._num_keys_read = 0

    def __repr__(self) -> str:
        return f"RolloutDirectory({str(self.path)!r})"

    def write(
        self,
        samples: Iterable[Sample],
        plan_json: str | None = None,
        *,
        parts: Sequence[Sequence[int]] | None = None,
        key: str | None = None,
    ) -> int:
        """Writes a batch, on disk and whole before it can be seen.

        Args:
            samples: At least one sample; siblings share a rollout_id.
            plan_json: The text of a plan for this batch, kept beside it.
            parts: Rows that one reader takes together, for each reader; see `write_planned`.
            key: Names what is in the batch, unique in the run. If a batch of that key is there, it
                is not written again and its id is returned.

        Returns:
            The batch id: 0 for the first batch, then 1, 2…

        Raises:
            RolloutDataError: `validate_samples` rejects the samples, the run is finished, or the
                path is not a rollout directory.
            OSError: The file system refuses (disk full, for example); nothing is left behind.
        """
        batch = RolloutBatch(samples, vocab_size=self._vocab_size)
        division = Parts.of(len(batch), parts)
        if plan_json is not None:
            check_text("the plan of the batch", plan_json)
        if key is not None and (found := self._batch_of_key(check_key(key))) is not None:
            return found
        stamp = uuid.uuid4().hex
        with self._new_slot() as slot:
            for number, rows in enumerate(division.rows):
                with new_file(slot / _part_name(number)) as file:
                    members = [batch[row] for row in rows]
                    write_part(file, members, rows, stamp=stamp)
            with new_file(slot / _INDEX) as file:
                write_index(file, batch.samples, division.places, stamp)
            write_manifest(slot, stamp)
            if plan_json is not None:
                write_text(slot / _PLAN, plan_json)
            if key is not None:
                write_text(slot / _KEY, key)
            return self._publish(slot, key)

    def finish(self) -> int:
        """Closes the run: no batch follows, and training ends after the last one.

        Returns:
            The number of batches of the run.

        Raises:
            RolloutDataError: The run is finished already, or the path is not a rollout directory.
        """
        with self._new_slot() as slot:
            write_text(slot / _END, "No batch follows.\n")
            return self._publish(slot, None)

    def state(self, batch_id: int) -> BatchState:
        """Whether a batch is there: "present", "end" (the run is closed without it) or "absent".

        Waits at most for `open_timeout`, and only where the directory itself looks half-made.

        Raises:
            RolloutDataError: The path is something other than a rollout directory, or the batch
                was deleted.
        """
        batch_id = batch_number(batch_id)
        if not self._marker.is_there():
            return "absent"
        state = self._slot_state(batch_id)
        if state == "deleted":
            raise deleted_error(str(self._batch_path(batch_id)))
        # In a live run the batch before it was just trained, and this saves a listing per poll.
        if state != "absent" or (batch_id > 0 and self._slot_state(batch_id - 1) == "present"):
            return state
        last = self._last_slot()
        return "end" if 0 <= last < batch_id and self._slot_state(last) == "end" else "absent"

    def index(self, batch_id: int) -> SampleIndex:
        """Lengths and ids of a batch, without reading a token.

        Raises:
            RolloutDataError: No such batch; or it is damaged, lacks a column, holds impossible
                lengths, or token ids outside the vocabulary. The file is named.
        """
        return self._read(batch_id, _INDEX, lambda file: read_index(file, self._vocab_size))

    def read(
        self, batch_id: int, rows: Sequence[int], fields: Collection[str] | None = None
    ) -> list[Sample]:
        """Some rows of a batch, in the order asked; reads their bytes and little else.

        Args:
            batch_id: The batch.
            rows: Row numbers, 0 ≤ row < S.
            fields: Optional fields of `Sample` to read; None: all that there are.

        Raises:
            RolloutDataError: No such batch, row or field; or it is damaged, lacks a column, or
                holds samples that `validate_samples` rejects. File and row or column are named.
        """
        if not rows:
            check_fields(fields)
        samples: dict[int, Sample] = {}
        places = self._read(batch_id, _INDEX, lambda file: read_places(file, fields))
        for part, positions in places.by_part(rows).items():
            cells = places.cells(part)

            def read(
                file: Stored, positions: Any = positions, cells: Any = cells
            ) -> dict[int, Sample]:
                return read_part([file], positions, cells, fields, self._vocab_size)

            samples |= self._read(batch_id, _part_name(part), read)
        return [samples[row] for row in rows]

    def stamp(self, batch_id: int) -> str:
        """What the files of this batch, and of no other, are stamped with.

        Raises:
            RolloutDataError: No such batch, or its index is damaged.
        """
        self._read(batch_id, _INDEX, lambda file: None)  # waits until it is visible
        return read_manifest(self._batch_path(batch_id)).stamp

    def plan_json(self, batch_id: int) -> str | None:
        """The text of the plan that came with a batch, or None.

        Raises:
            RolloutDataError: No such batch, or the text is not UTF-8.
        """
        path = self._batch_path(batch_id)
        self._when_visible(path / _INDEX, lambda: own_file(self.path, path.name, _INDEX))
        return own_text(self.path, path.name, _PLAN)

    def read_parts(self, batch_id: int) -> tuple[list[Sample], list[list[int]]]:
        """All samples of a batch in row order, and the rows of each of its parts in order."""
        rows = range(len(self.index(batch_id)))
        places = self._read(batch_id, _INDEX, lambda file: read_places(file, ())).by_part(rows)
        parts = [sorted(at, key=at.__getitem__) for _, at in sorted(places.items())]
        return self.read(batch_id, rows), parts

    def num_batches_if_finished(self) -> int | None:
        """The number of batches of a closed run, else None."""
        last = self._last_slot() if self._marker.is_there() else -1
        return last if last >= 0 and self._slot_state(last) == "end" else None

    def delete_before(self, batch_id: int) -> None:
        """Deletes the samples of all batches before `batch_id`; their numbers stay taken."""
        if not self._marker.is_there():
            return
        for number in self._slots():
            if number < batch_id and self._slot_state(number) == "present":
                slot = self._batch_path(number)
                write_text(slot / _DELETED, "A completed checkpoint lies beyond this batch.\n")
                for path in [slot / _INDEX, slot / MANIFEST, slot / _PLAN, *slot.glob("part-*")]:
                    path.unlink(missing_ok=True)

    def publish(self, name: str, text: str) -> None:
        """Leaves a note for the other side, in the place of an older one of that name."""
        check_note_name(name)
        check_text(f"note {name!r}", text)
        if not self._marker.is_there():
            self._marker.create()
        with suppress(FileExistsError):
            (self.path / _NOTES).mkdir()
        replace_text(own_folder(self.path, _NOTES) / name, text)

    def published(self, name: str) -> str | None:
        """The latest note of that name, or None.

        Raises:
            RolloutDataError: The path is something other than a rollout directory, or the note is
                not UTF-8.
        """
        check_note_name(name)
        return own_text(self.path, _NOTES, name) if self._marker.is_there() else None

    def _batch_path(self, batch_id: int) -> Path:
        return self.path / f"batch-{batch_number(batch_id):08d}"

    def _slot_state(self, batch_id: int) -> SlotState:
        path = self._batch_path(batch_id)
        with suppress(FileNotFoundError):
            own_folder(self.path, path.name)
        if (path / _DELETED).exists():
            return "deleted"
        if (path / _INDEX).exists():
            return "present"
        return "end" if (path / _END).exists() else "absent"

    def _slots(self) -> list[int]:
        matches = (_BATCH_NAME.fullmatch(name) for name in os.listdir(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def _last_slot(self) -> int:
        """The highest number in use, −1 if there is none."""
        return max(self._slots(), default=-1)

    def _batch_of_key(self, key: str) -> int | None:
        """The batch of that key, if it is among those that are there now."""
        if not self._marker.is_there():
            return None
        for number in self._slots():
            if number >= self._num_keys_read:
                self._note_key(number)
        return self._keys.get(key)

    def _note_key(self, number: int) -> None:
        key = own_text(self.path, self._batch_path(number).name, _KEY)
        if key is not None:
            self._keys.setdefault(key, number)
        self._num_keys_read = number + 1

    def _read[T](self, batch_id: int, name: str, read: Callable[[Stored], T]) -> T:
        """What `read` makes of a file of a batch, once it is visible."""
        batch = self._batch_path(batch_id)

        def check_and_read() -> T:
            own_file(self.path, batch.name, name)
            return read(read_manifest(batch).checked(batch / name))

        return self._when_visible(batch / name, check_and_read)

    def _when_visible[T](self, path: Path, read: Callable[[], T]) -> T:
        """Calls `read`, again and again for a bounded time while `path` is not to be found."""
        if not self._marker.is_there():
            raise RolloutDataError(f"{self.path}: no batch is there yet; wait for state() first")
        deadline = time.monotonic() + self._open_timeout
        while True:
            try:
                return read()
            except (FileNotFoundError, NotADirectoryError) as error:
                if (path.parent / _DELETED).exists():
                    raise deleted_error(str(path.parent)) from error
                if time.monotonic() >= deadline:
                    raise RolloutDataError(
                        f"{path} is not there, looked for during {self._open_timeout} s; "
                        "it was deleted, or the shared file system does not show it"
                    ) from error
            time.sleep(min(0.1, self._open_timeout))

    @contextmanager
    def _new_slot(self) -> Iterator[Path]:
        """A hidden directory to be filled and published; gone if that fails."""
        if not self._marker.is_there():
            self._marker.create()
        slot = self.path / f"{TEMPORARY}{uuid.uuid4().hex}"
        slot.mkdir()
        try:
            yield slot
        finally:
            shutil.rmtree(slot, ignore_errors=True)  # a published one is no longer there

    def _publish(self, slot: Path, key: str | None) -> int:
        """Renames a filled slot onto the next free number and returns that number."""
        sync(slot)
        batch_id = self._last_slot() + 1
        while True:
            # Numbers are taken one after the other, so an end can only be just before this one.
            if batch_id > 0 and self._slot_state(batch_id - 1) == "end":
                raise RolloutDataError(
                    f"{self.path}: the run is finished after {batch_id - 1} batches; "
                    "start another one in a new directory"
                )
            # Every batch before this number is there now, so none of the same key is missed.
            if key is not None and (found := self._batch_of_key(key)) is not None:
                return found
            try:
                os.rename(slot, self._batch_path(batch_id))
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                batch_id += 1  # another writer was faster
                continue
            sync(self.path)
            return batch_id


def _part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"

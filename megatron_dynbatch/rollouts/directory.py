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
    DIR/.tmp-…                             what a writer works on, or left when it died

Invariants (asserted by the tests): a batch or the end of the run appears as a whole, by one rename
of a hidden directory onto the next free number, so that no reader sees a part, no two writers get
one number, and no batch comes after the end. A writer that dies leaves only a hidden directory.
Nothing depends on clocks. Reading is here; `batch_writer` writes, `retention` deletes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_dynbatch.rollouts.batch import RolloutBatch
from megatron_dynbatch.rollouts.batch_writer import BatchWriter, part_name
from megatron_dynbatch.rollouts.checked_paths import (
    check_text,
    checked_path,
    own_file,
    own_folder,
    own_text,
)
from megatron_dynbatch.rollouts.content import content_of_files, stored_content
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.files import make_folder, replace_text
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.manifest import read_manifest
from megatron_dynbatch.rollouts.marker import FORMAT_VERSION, DirectoryMarker
from megatron_dynbatch.rollouts.parquet_file import Stored
from megatron_dynbatch.rollouts.parquet_index import read_index, read_places
from megatron_dynbatch.rollouts.parquet_read import check_fields, read_part
from megatron_dynbatch.rollouts.parquet_write import Parts
from megatron_dynbatch.rollouts.retention import Retention
from megatron_dynbatch.rollouts.sample import Sample
from megatron_dynbatch.rollouts.slots import BATCH_NAME, DELETED, INDEX, NOTES, PLAN, Slots
from megatron_dynbatch.rollouts.source import BatchState
from megatron_dynbatch.rollouts.store import batch_number, check_key, check_note_name, deleted_error

__all__ = ["FORMAT_VERSION", "RolloutDirectory"]


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
            open_timeout: Seconds for which a file or batch that should be there is looked for
                again: a shared file system may show a directory before what is in it, and one
                batch before another.
        """
        self.path = checked_path(path)
        self._vocab_size = vocab_size
        self._open_timeout = open_timeout
        self._marker = DirectoryMarker(self.path, BATCH_NAME, open_timeout)
        self._slots = Slots(self.path, open_timeout)
        self._writer = BatchWriter(self._slots, self._marker)
        self._retention = Retention(self._slots)

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
            RolloutDataError: `validate_samples` rejects the samples, the run is finished, the path
                is not a rollout directory, or a batch before this one is missing.
            OSError: The file system refuses (disk full, for example); nothing is left behind.
        """
        batch = RolloutBatch(samples, vocab_size=self._vocab_size)
        division = Parts.of(len(batch), parts)
        if plan_json is not None:
            check_text("the plan of the batch", plan_json)
        if key is not None and (found := self._writer.batch_of_key(check_key(key))) is not None:
            return found
        return self._writer.write(batch, division, plan_json, key)

    def finish(self) -> int:
        """Closes the run: no batch follows, and training ends after the last one.

        Returns:
            The number of batches of the run.

        Raises:
            RolloutDataError: The run is finished already, or the path is not a rollout directory.
        """
        return self._writer.finish()

    def is_there(self) -> bool:
        """Whether the path is a rollout directory, or an empty one.

        Raises:
            RolloutDataError: It is something else.
        """
        return self._marker.is_there() or self.path.is_dir()

    def state(self, batch_id: int) -> BatchState:
        """Whether a batch is there: "present", "end" (the run is closed without it) or "absent".

        Waits at most for `open_timeout`, and only where the directory itself looks half-made.

        Raises:
            RolloutDataError: The path is something other than a rollout directory, the batch was
                deleted, or it cannot come: later ones, the end, or a folder that is no batch have
                been there for `open_timeout` (asked again and again, as whoever waits does).
        """
        batch_id = batch_number(batch_id)
        if not self._marker.is_there():
            return "absent"
        state = self._slots.state(batch_id)
        if state == "deleted":
            raise deleted_error(str(self._slots.folder(batch_id)))
        if state != "absent":
            return state
        # In a live run the batch before it was just trained, and this saves a listing per poll.
        if batch_id == 0 or self._slots.state(batch_id - 1) != "present":
            last = self._slots.last()
            if 0 <= last < batch_id and self._slots.state(last) == "end":
                return "end"
        self._slots.check_waiting_for(batch_id)
        return "absent"

    def index(self, batch_id: int) -> SampleIndex:
        """Lengths and ids of a batch, without reading a token.

        Raises:
            RolloutDataError: No such batch; or it is damaged, lacks a column, holds impossible
                lengths, or token ids outside the vocabulary. The file is named.
        """
        return self._read(batch_id, INDEX, lambda file: read_index(file, self._vocab_size))

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
        places = self._read(batch_id, INDEX, lambda file: read_places(file, fields))
        for part, positions in places.by_part(rows).items():
            cells = places.cells(part)

            def read(
                file: Stored, positions: Any = positions, cells: Any = cells
            ) -> dict[int, Sample]:
                return read_part([file], positions, cells, fields, self._vocab_size)

            samples |= self._read(batch_id, part_name(part), read)
        return [samples[row] for row in rows]

    def stamp(self, batch_id: int) -> str:
        """What the files of this batch, and of no other, are stamped with.

        Raises:
            RolloutDataError: No such batch, or its index is damaged.
        """
        self._read(batch_id, INDEX, lambda file: None)  # waits until it is visible
        return read_manifest(self._slots.folder(batch_id)).stamp

    def source_id(self) -> str:
        """The directory's own, kept by `cp -r` and `mv`; "" in those of an older version."""
        return self._marker.id

    def content_stamp(self, batch_id: int, *, verify: bool = False) -> str:
        """What a batch holds; see `RolloutSource.content_stamp`.

        Raises:
            RolloutDataError: No such batch, or it is damaged; with `verify`: its parts are not
                those that it was written with.
        """
        stored = self._read(batch_id, INDEX, stored_content)
        if stored is not None and not verify:
            return stored
        batch = self._slots.folder(batch_id)

        def of_files(index: Stored) -> str:
            manifest = read_manifest(batch)
            return content_of_files(index, lambda n: manifest.checked(batch / part_name(n)))

        found = self._read(batch_id, INDEX, of_files)
        if stored not in (None, found):
            raise RolloutDataError(
                f"{batch}: its parts were changed after it was written (their checksums make the "
                f"stamp {found}, its index says {stored}): write the batch again"
            )
        return found

    def plan_json(self, batch_id: int) -> str | None:
        """The text of the plan that came with a batch, or None.

        Raises:
            RolloutDataError: No such batch, or the text is not UTF-8.
        """
        path = self._slots.folder(batch_id)
        self._when_visible(path / INDEX, lambda: own_file(self.path, path.name, INDEX))
        return own_text(self.path, path.name, PLAN)

    def read_parts(self, batch_id: int) -> tuple[list[Sample], list[list[int]]]:
        """All samples of a batch in row order, and the rows of each of its parts in order."""
        rows = range(len(self.index(batch_id)))
        places = self._read(batch_id, INDEX, lambda file: read_places(file, ())).by_part(rows)
        parts = [sorted(at, key=at.__getitem__) for _, at in sorted(places.items())]
        return self.read(batch_id, rows), parts

    def num_batches_if_finished(self) -> int | None:
        """The number of batches of a closed run, else None."""
        last = self._slots.last() if self._marker.is_there() else -1
        return last if last >= 0 and self._slots.state(last) == "end" else None

    def delete_before(self, batch_id: int) -> None:
        """Deletes the samples of all batches before `batch_id`; their numbers and keys stay taken.

        Goes on wherever it was stopped before. What the file system refuses to delete is said in
        one line, and is tried again at the next call.
        """
        if self._marker.is_there():
            self._retention.delete_before(batch_id)

    def publish(self, name: str, text: str) -> None:
        """Leaves a note for the other side, in the place of an older one of that name."""
        check_note_name(name)
        check_text(f"note {name!r}", text)
        if not self._marker.is_there():
            self._marker.create()
        with suppress(FileExistsError):
            make_folder(self.path / NOTES, "notes")
        replace_text(own_folder(self.path, NOTES) / name, text, "note")

    def published(self, name: str) -> str | None:
        """The latest note of that name, or None.

        Raises:
            RolloutDataError: The path is something other than a rollout directory, or the note is
                not UTF-8.
        """
        check_note_name(name)
        return own_text(self.path, NOTES, name) if self._marker.is_there() else None

    def _read[T](self, batch_id: int, name: str, read: Callable[[Stored], T]) -> T:
        """What `read` makes of a file of a batch, once it is visible."""
        batch = self._slots.folder(batch_id)

        def check_and_read() -> T:
            own_file(self.path, batch.name, name)
            return read(read_manifest(batch).checked(batch / name))

        return self._when_visible(batch / name, check_and_read)

    def _when_visible[T](self, path: Path, read: Callable[[], T]) -> T:
        """Calls `read`, again and again for a bounded time while `path` is not to be found."""
        if not self._marker.is_there():
            if not self.path.exists():
                raise RolloutDataError(f"{self.path} does not exist; is the path right?")
            raise RolloutDataError(f"{self.path}: no batch is there yet; wait for state() first")
        deadline = time.monotonic() + self._open_timeout
        while True:
            try:
                return read()
            except (FileNotFoundError, NotADirectoryError) as error:
                if (path.parent / DELETED).exists():
                    raise deleted_error(str(path.parent)) from error
                if time.monotonic() >= deadline:
                    raise RolloutDataError(
                        f"{path} is not there, looked for during {self._open_timeout} s; "
                        "it was deleted, or the shared file system does not show it"
                    ) from error
            time.sleep(min(0.1, self._open_timeout))

"""Rollouts as files: the default transport, on a local disk or a shared file system.

    DIR/dynbatch.json                     makes DIR a rollout directory, with the format's version
    DIR/batch-00000000/samples.parquet    a batch
                      /plan.json          the plan that the rollout side made for it, if any
    DIR/batch-00000001/END                no batch follows

Invariants (asserted by the tests): a batch or the end of the run appears as a whole, by one rename
of a hidden directory onto the next free number, so that no reader sees a part, no two writers get
one number, and no batch comes after the end. A writer that dies leaves only a hidden directory.
"""

import errno
import json
import operator
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_dynbatch.rollouts.batch import RolloutBatch
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.parquet import read_index, read_rows, write_samples
from megatron_dynbatch.rollouts.sample import Sample
from megatron_dynbatch.rollouts.source import BatchState

FORMAT_VERSION = 1

_FORMAT = "megatron-dynbatch rollouts"
_MARKER = "dynbatch.json"
_SAMPLES = "samples.parquet"
_PLAN = "plan.json"
_END = "END"
_TEMPORARY = ".tmp-"
_BATCH_NAME = re.compile(r"batch-(\d{8,})")


class RolloutDirectory:
    """A directory of rollout batches, for any number of writers and readers.

    The directory is made by the first `write`; a reader may be there before it.
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
        self.path = Path(path)
        self._vocab_size = vocab_size
        self._open_timeout = open_timeout
        self._is_checked = False

    def __repr__(self) -> str:
        return f"RolloutDirectory({str(self.path)!r})"

    def write(self, samples: Iterable[Sample], plan_json: str | None = None) -> int:
        """Writes a batch, on disk and whole before it can be seen.

        Args:
            samples: At least one sample; siblings share a rollout_id.
            plan_json: The text of a plan for this batch, kept beside it.

        Returns:
            The batch id: 0 for the first batch, then 1, 2…

        Raises:
            RolloutDataError: `validate_samples` rejects the samples, the run is finished, or the
                path is not a rollout directory.
            OSError: The file system refuses (disk full, for example); nothing is left behind.
        """
        batch = RolloutBatch(samples, vocab_size=self._vocab_size)
        with self._new_slot() as slot:
            write_samples(slot / _SAMPLES, batch.samples)
            _sync(slot / _SAMPLES)
            if plan_json is not None:
                _write_text(slot / _PLAN, plan_json)
            return self._publish(slot)

    def finish(self) -> int:
        """Closes the run: no batch follows, and training ends after the last one.

        Returns:
            The number of batches of the run.

        Raises:
            RolloutDataError: The run is finished already, or the path is not a rollout directory.
        """
        with self._new_slot() as slot:
            _write_text(slot / _END, "No batch follows.\n")
            return self._publish(slot)

    def state(self, batch_id: int) -> BatchState:
        """Whether a batch is there: "present", "end" (the run is closed without it) or "absent".

        Waits at most for `open_timeout`, and only where the directory itself looks half-made.

        Raises:
            RolloutDataError: The path is something other than a rollout directory.
        """
        batch_id = _batch_number(batch_id)
        if not self._is_rollout_directory():
            return "absent"
        state = self._slot_state(batch_id)
        # In a live run the batch before it was just trained, and this saves a listing per poll.
        if state != "absent" or (batch_id > 0 and self._slot_state(batch_id - 1) == "present"):
            return state
        last = self._last_slot()
        return "end" if last < batch_id and self._slot_state(last) == "end" else "absent"

    def index(self, batch_id: int) -> SampleIndex:
        """Lengths and ids of a batch, without reading a token.

        Raises:
            RolloutDataError: No such batch; or it is damaged, lacks a column, holds impossible
                lengths, or token ids outside the vocabulary. The file is named.
        """
        path = self._batch_path(batch_id) / _SAMPLES
        return self._when_visible(path, lambda: read_index(path, self._vocab_size))

    def read(
        self, batch_id: int, rows: Sequence[int], fields: Collection[str] | None = None
    ) -> list[Sample]:
        """Some rows of a batch, in the order asked; reads only the row groups that hold them.

        Args:
            batch_id: The batch.
            rows: Row numbers, 0 ≤ row < S.
            fields: Optional fields of `Sample` to read; None: all that there are.

        Raises:
            ValueError: No such row or field.
            RolloutDataError: No such batch; or it is damaged, lacks a column, or holds samples that
                `validate_samples` rejects. File and row or column are named.
        """
        path = self._batch_path(batch_id) / _SAMPLES
        return self._when_visible(path, lambda: read_rows(path, rows, fields, self._vocab_size))

    def plan_json(self, batch_id: int) -> str | None:
        """The text of the plan that came with a batch, or None.

        Raises:
            RolloutDataError: No such batch, or the text is not UTF-8.
        """
        path = self._batch_path(batch_id)
        self._when_visible(path / _SAMPLES, (path / _SAMPLES).stat)
        try:
            return (path / _PLAN).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise RolloutDataError(f"{path / _PLAN}: not UTF-8 text ({error})") from error

    def _batch_path(self, batch_id: int) -> Path:
        return self.path / f"batch-{_batch_number(batch_id):08d}"

    def _slot_state(self, batch_id: int) -> BatchState:
        path = self._batch_path(batch_id)
        if (path / _SAMPLES).exists():
            return "present"
        return "end" if (path / _END).exists() else "absent"

    def _last_slot(self) -> int:
        """The highest number in use, −1 if there is none."""
        matches = (_BATCH_NAME.fullmatch(name) for name in os.listdir(self.path))
        return max((int(match[1]) for match in matches if match), default=-1)

    def _when_visible[T](self, path: Path, read: Callable[[], T]) -> T:
        """Calls `read`, again and again for a bounded time while `path` is not to be found."""
        if not self._is_rollout_directory():
            raise RolloutDataError(f"{self.path}: no batch is there yet; wait for state() first")
        deadline = time.monotonic() + self._open_timeout
        while True:
            try:
                return read()
            except (FileNotFoundError, NotADirectoryError) as error:
                if time.monotonic() >= deadline:
                    raise RolloutDataError(
                        f"{path} is not there, looked for during {self._open_timeout} s; "
                        "it was deleted, or the shared file system does not show it"
                    ) from error
            time.sleep(min(0.1, self._open_timeout))

    def _is_rollout_directory(self) -> bool:
        """True if marked as one; False if there is nothing yet; an error for anything else."""
        if self._is_checked:
            return True
        deadline = time.monotonic() + self._open_timeout
        while True:
            try:
                _check_marker(self.path / _MARKER)
                self._is_checked = True
                return True
            except FileNotFoundError:
                names = self._foreign_names()
            if not names:
                return False
            # Batches without the marker: a shared file system that is not up to date.
            may_follow = any(_BATCH_NAME.fullmatch(name) for name in names)
            if not may_follow or time.monotonic() >= deadline:
                raise RolloutDataError(
                    f"{self.path} is not a rollout directory: it holds {names[0]!r} but no "
                    f"{_MARKER}; give a new or empty directory, or one from RolloutDirectory.write"
                )
            time.sleep(min(0.1, self._open_timeout))

    def _foreign_names(self) -> list[str]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(_TEMPORARY))

    @contextmanager
    def _new_slot(self) -> Iterator[Path]:
        """A hidden directory to be filled and published; gone if that fails."""
        if not self._is_rollout_directory():
            self._create()
        slot = self.path / f"{_TEMPORARY}{uuid.uuid4().hex}"
        slot.mkdir()
        try:
            yield slot
        finally:
            shutil.rmtree(slot, ignore_errors=True)  # a published one is no longer there

    def _create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / f"{_TEMPORARY}{uuid.uuid4().hex}"
        _write_text(temporary, json.dumps({"format": _FORMAT, "version": FORMAT_VERSION}) + "\n")
        os.replace(temporary, self.path / _MARKER)
        _sync(self.path)
        self._is_checked = True

    def _publish(self, slot: Path) -> int:
        """Renames a filled slot onto the next free number and returns that number."""
        _sync(slot)
        batch_id = self._last_slot() + 1
        while True:
            # Numbers are taken one after the other, so an end can only be just before this one.
            if batch_id > 0 and self._slot_state(batch_id - 1) == "end":
                raise RolloutDataError(
                    f"{self.path}: the run is finished after {batch_id - 1} batches; "
                    "start another one in a new directory"
                )
            try:
                os.rename(slot, self._batch_path(batch_id))
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                batch_id += 1  # another writer was faster
                continue
            _sync(self.path)
            return batch_id


def _batch_number(batch_id: int) -> int:
    number = operator.index(batch_id)
    if number < 0:
        raise ValueError(f"batch id {number} is negative; batches are numbered from 0")
    return number


def _check_marker(path: Path) -> None:
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
    except NotADirectoryError as error:
        raise RolloutDataError(f"{path.parent} is a file, not a rollout directory") from error
    except ValueError as error:
        raise RolloutDataError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(marker, dict) or marker.get("format") != _FORMAT:
        raise RolloutDataError(f"{path} does not say format {_FORMAT!r}; not a rollout directory")
    if marker.get("version") != FORMAT_VERSION:
        raise RolloutDataError(
            f"{path.parent} has format version {marker.get('version')}, this megatron_dynbatch "
            f"reads version {FORMAT_VERSION}; use the same version on both sides"
        )


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """Puts a file or the entries of a directory on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Every durable write of the package: files that are there as a whole or not at all.

Each function is told what it writes, by a name of `failpoints.WRITES`, so that tests can stop it
before, in the middle of and after each write (asserted: no other file of the package writes).
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from megatron_dynbatch import failpoints
from megatron_dynbatch.rollouts.hidden import hidden_name, lock


def sync(path: Path) -> None:
    """Puts a file or the entries of a directory on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_file(path: Path, what: str, mode: str = "xb") -> Iterator[IO[bytes]]:
    """A new file to be written, which is on disk afterwards.

    Args:
        path: The file.
        what: A name of `failpoints.WRITES`, here and in all functions below.
        mode: "xb": it must not be there; "wb": it may be.

    Raises:
        OSError: The file exists or cannot be written (disk full, for example).
    """
    failpoints.reached(what, "before")
    with open(path, mode) as file:
        yield file
        file.flush()
        failpoints.torn(what, file.fileno())
        os.fsync(file.fileno())
    failpoints.reached(what, "after")


def write_text(path: Path, text: str, what: str) -> None:
    """Writes a file and puts it on disk."""
    with new_file(path, what, "wb") as file:
        file.write(text.encode())


def create_text(path: Path, text: str, what: str) -> None:
    """Writes a file unless there is one: of several writers, one has its way.

    It appears as a whole. Where the file system has no hard links it may be seen empty for a
    moment.

    Args:
        path: The file.
        text: What will be in it.
        what: A name of `failpoints.WRITES`; so is `what` with "-move".
    """
    temporary = path.with_name(hidden_name())
    try:
        with open(temporary, "xb") as file:
            lock(file.fileno())
            _fill(file, text, what)
            _link(temporary, path, text, what)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _fill(file: IO[bytes], text: str, what: str) -> None:
    failpoints.reached(what, "before")
    file.write(text.encode())
    file.flush()
    failpoints.torn(what, file.fileno())
    os.fsync(file.fileno())
    failpoints.reached(what, "after")


def _link(temporary: Path, path: Path, text: str, what: str) -> None:
    failpoints.reached(f"{what}-move", "before")
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # no hard links here, perhaps; a full disk or the like is met again
        _create_in_place(path, text)
    failpoints.reached(f"{what}-move", "after")


def _create_in_place(path: Path, text: str) -> None:
    try:
        file = open(path, "x", encoding="utf-8")
    except FileExistsError:
        return
    with file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink()
            raise


def replace_text(path: Path, text: str, what: str, temporary: Path | None = None) -> None:
    """Writes a file, or puts it in the place of an older one, in one move.

    Args:
        path: The file.
        text: What will be in it.
        what: A name of `failpoints.WRITES`; so is `what` with "-move".
        temporary: Where it is written first; by default a name that no other writer has.
    """
    for attempt in range(2):
        hidden = temporary or path.with_name(hidden_name())
        try:
            with open(hidden, "wb") as file:
                lock(file.fileno())
                _fill(file, text, what)
                move(hidden, path, f"{what}-move")
            break
        except OSError as error:
            hidden.unlink(missing_ok=True)
            # Gone although it is new: somebody who cleans up took it for dead.
            if attempt or not isinstance(error, FileNotFoundError) or not path.parent.exists():
                raise
    sync(path.parent)


def make_folder(path: Path, what: str, *, parents: bool = False, exist_ok: bool = False) -> None:
    """Makes a directory."""
    failpoints.reached(what, "before")
    path.mkdir(parents=parents, exist_ok=exist_ok)
    failpoints.reached(what, "after")


def move(source: Path, target: Path, what: str) -> None:
    """Gives a file or directory another name.

    Raises:
        OSError: Another directory that is not empty has it (ENOTEMPTY or EEXIST), or the file
            system refuses.
    """
    failpoints.reached(what, "before")
    os.rename(source, target)
    failpoints.reached(what, "after")


def remove_file(path: Path, what: str) -> None:
    """Removes a file that may be gone already."""
    failpoints.reached(what, "before")
    path.unlink(missing_ok=True)
    failpoints.reached(what, "after")


def remove_folder(path: Path, what: str) -> None:
    """Removes a file or a directory of files, as far as that goes; it may be gone already."""
    with suppress(OSError):
        failpoints.reached(what, "before")
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        failpoints.reached(what, "after")


def append(descriptor: int, data: bytes, what: str) -> None:
    """Appends to a file, all of it or nothing, and puts it on disk.

    Args:
        descriptor: Of a file opened with O_APPEND, to which no other process writes now.
        data: What to append.
        what: A name of `failpoints.WRITES`.

    Raises:
        OSError: The file system refuses; the file is as long as it was, unless that fails too.
    """
    before = os.fstat(descriptor)
    is_file = stat.S_ISREG(before.st_mode)  # a pipe or device has no size and no disk
    try:
        failpoints.reached(what, "before")
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if is_file:
            failpoints.torn(what, descriptor, before.st_size)
            os.fsync(descriptor)
        failpoints.reached(what, "after")
    except OSError:
        if is_file:
            with suppress(OSError):
                os.ftruncate(descriptor, before.st_size)
        raise


def cut(descriptor: int, size: int, what: str) -> None:
    """Cuts a file to a size, and puts that on disk."""
    failpoints.reached(what, "before")
    os.ftruncate(descriptor, size)
    os.fsync(descriptor)
    failpoints.reached(what, "after")

"""Small files that are there as a whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from megatron_dynbatch.rollouts.errors import RolloutDataError

TEMPORARY = ".tmp-"
"""Names of what is not finished begin with it."""


def sync(path: Path) -> None:
    """Puts a file or the entries of a directory on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def text_of(path: Path) -> str | None:
    """What a text file says, None if there is none.

    Raises:
        RolloutDataError: It is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise RolloutDataError(f"{path}: not UTF-8 text ({error})") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file and puts it on disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def create_text(path: Path, text: str) -> None:
    """Writes a file unless there is one: of several writers, one has its way.

    It appears as a whole. Where the file system has no hard links it may be seen empty for a
    moment.
    """
    temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        write_text(temporary, text)
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # no hard links here, perhaps; a full disk or the like is met again
        _create_in_place(path, text)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


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


def replace_text(path: Path, text: str) -> None:
    """Writes a file, or puts it in the place of an older one, in one move."""
    temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    write_text(temporary, text)
    os.replace(temporary, path)
    sync(path.parent)

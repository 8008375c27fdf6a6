"""Small files that are there as a whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

TEMPORARY = ".tmp-"
"""Names of what is not finished begin with it."""


def sync(path: Path) -> None:
    """Puts a file or the entries of a directory on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Writes a file and puts it on disk."""
    path.write_text(text, encoding="utf-8")
    sync(path)


def replace_text(path: Path, text: str) -> None:
    """Writes a file, or puts it in the place of an older one, in one move."""
    temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    write_text(temporary, text)
    os.replace(temporary, path)
    sync(path.parent)

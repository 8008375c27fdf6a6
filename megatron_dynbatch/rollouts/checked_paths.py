"""Paths from outside: names that can be paths, and entries of a rollout directory that are its own.

A rollout directory is shared, so what lies in it is looked at before it is followed. Invariants
(asserted by the tests): nothing is read through a symbolic link below the directory, whose own
path may be one; nothing but a regular file is opened, since a pipe would be waited for; and a
small file is not read if it is none.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.strict_json import parse_json
from megatron_dynbatch.wording import short

MAX_NAME_BYTES = 255
"""What Linux file systems take as one name."""

MAX_TEXT_BYTES = 1 << 26
"""What a plan, a manifest or a note may have; a plan of 2^19 samples has some 25 MB."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def checked_path(path: Any) -> Path:
    """`path`, if a file or directory can have it.

    Raises:
        OptionError: It is no path, empty, a URL, or has a name that no file can have.
    """
    try:
        text = os.fspath(path)
    except TypeError as error:
        raise OptionError(f"path {short(path)}: give text or a pathlib.Path") from error
    if not isinstance(text, str) or not text:
        raise OptionError(f"path {short(text)}: give the path of a directory or file as text")
    if scheme := _SCHEME.match(text):
        raise OptionError(
            f"path {short(text)}: nothing here reads {scheme[1]}:; give a local path (mount the "
            "storage), queue:NAME, or ray://HOST:PORT/NAME where a transport is asked for"
        )
    try:
        names = os.fsencode(text).split(b"/")
    except UnicodeEncodeError as error:
        raise OptionError(f"path {short(text)}: it is not Unicode ({error.reason})") from error
    if b"\0" in os.fsencode(text) or max(map(len, names)) > MAX_NAME_BYTES:
        raise OptionError(
            f"path {short(text)}: no file can have that name; it has a NUL character, or a part of "
            f"more than {MAX_NAME_BYTES} bytes"
        )
    return Path(text)


def own_folder(root: Path, name: str) -> Path:
    """An entry of a rollout directory, if it is a folder of its own; call it before deleting there.

    Raises:
        FileNotFoundError: There is no such entry.
        RolloutDataError: It is a symbolic link, or no folder.
    """
    path = root / name
    _check_kind(path, path.lstat(), stat.S_ISDIR, "a folder")
    return path


def own_file(root: Path, *names: str) -> Path:
    """A file below a rollout directory, reached without a symbolic link.

    Raises:
        FileNotFoundError: It is not there.
        RolloutDataError: It, or a folder on the way, is a symbolic link or not what it should be.
    """
    *folders, name = names
    for folder in folders:
        root = own_folder(root, folder)
    path = root / name
    _check_kind(path, path.lstat(), stat.S_ISREG, "a file")
    return path


def own_bytes(root: Path, *names: str, most: int = MAX_TEXT_BYTES) -> bytes:
    """What a small file below a rollout directory holds.

    Raises:
        FileNotFoundError: It is not there.
        RolloutDataError: As `own_file`; or it has more than `most` bytes.
    """
    path = own_file(root, *names)
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise RolloutDataError(
            f"{path} has more than {most} bytes; it is not what it should be: write it again"
        )
    return content


def own_text(root: Path, *names: str) -> str | None:
    """What a text file below a rollout directory says, None if it is not there.

    Raises:
        RolloutDataError: As `own_bytes`; or it is not UTF-8.
    """
    try:
        return own_bytes(root, *names).decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise RolloutDataError(f"{root.joinpath(*names)}: not UTF-8 text ({error})") from error


def own_json(root: Path, *names: str) -> Any:
    """What a JSON file below a rollout directory says; see `own_bytes`.

    Raises:
        ValueError: It is no JSON, see `parse_json`.
    """
    return parse_json(own_bytes(root, *names))


def check_text(what: str, text: Any) -> str:
    """`text`, if a file can hold it.

    Raises:
        RolloutDataError: It is no text, not Unicode, or longer than `MAX_TEXT_BYTES`.
    """
    if not isinstance(text, str):
        raise RolloutDataError(f"{what} is a {type(text).__name__}; give text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RolloutDataError(
            f"{what} has half of a surrogate pair at {error.start}; give Unicode text"
        ) from error
    if size > MAX_TEXT_BYTES:
        raise RolloutDataError(f"{what} has {size} bytes; at most {MAX_TEXT_BYTES} are read again")
    return text


def _check_kind(path: Path, status: os.stat_result, is_kind: Any, wanted: str) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise RolloutDataError(
            f"{path} is a symbolic link; links in a rollout directory are not followed: put "
            f"{wanted} there"
        )
    if not is_kind(status.st_mode):
        raise RolloutDataError(f"{path} is not {wanted}; something else was put there: remove it")

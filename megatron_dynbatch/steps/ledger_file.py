"""A file of JSON lines that a process appends to while it may be killed, or its disk be full.

Invariants (asserted by the tests, at every byte): a line is there as a whole or not at all as far
as readers are concerned, and what is left of a torn one is removed when the file is opened next,
also where another line was appended to it. Nothing that is not torn is removed.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.rollouts.files import append, cut, replace_text, sync
from megatron_dynbatch.rollouts.hidden import TEMPORARY
from megatron_dynbatch.rollouts.strict_json import unique_keys

_PROBE = b" " * 4096  # room for a line; no line end, which would make a torn line look whole


class LedgerError(DynbatchError, OSError):
    """A ledger that cannot be written, or whose lines cannot be read."""


@dataclass(frozen=True)
class Line:
    """One line of the file.

    Attributes:
        number: From 1.
        values: The JSON objects in it: one, or several where the line end between two is missing.
        is_whole: False: it is not one object and a line end, because a write was stopped.
    """

    number: int
    values: tuple[dict[str, Any], ...]
    is_whole: bool


def lines_of(path: Path, first_key: str) -> Iterator[Line]:
    """The lines of a file.

    Args:
        path: The file.
        first_key: With which every object begins.

    Raises:
        LedgerError: A line with an end that has something in it, but no such object.
    """
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            text = raw.decode(errors="replace")
            values, is_whole = _objects(text.strip(), first_key)
            is_ended = text.endswith("\n")
            if is_ended and not values and text.strip():
                raise none_of_ours(path, number, repr(text[:40]))
            yield Line(number, values, is_whole and is_ended)


def none_of_ours(path: str | os.PathLike[str], number: int, what: str) -> LedgerError:
    """The error of a line that is none of a ledger."""
    return LedgerError(
        f"{path}: line {number} is not one of a rollout ledger ({what}); it was damaged or written "
        "by something else: correct or remove it by hand, or give --rollout-ledger another file"
    )


def prepare(path: Path, first_key: str) -> str | None:
    """Makes the file if it is not there, and makes sure that lines can be appended.

    Args:
        path: The file.
        first_key: As of `lines_of`.

    Returns:
        A sentence about what was torn and is mended, or None.

    Raises:
        LedgerError: The file cannot be written, or is none of ours.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None  # a pipe or device; there is nothing to mend
            size = os.fstat(descriptor).st_size
            append(descriptor, _PROBE, "ledger-probe")
            cut(descriptor, size, "ledger-cut")
        finally:
            os.close(descriptor)
        sync(path.parent)
        return _mend(path, first_key)
    except LedgerError:
        raise
    except OSError as error:
        raise LedgerError(
            f"{path}: the rollout ledger cannot be written ({error.strerror}); give "
            "--rollout-ledger a file in a folder that is there and can be written, with room on "
            "its disk"
        ) from error


def append_line(path: Path, values: dict[str, Any]) -> None:
    """Adds a line, as a whole and on disk, whatever happens to the process afterwards.

    Raises:
        LedgerError: It is not added, because the file system refuses.
    """
    line = json.dumps(values, separators=(",", ":")) + "\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            append(descriptor, line.encode(), "ledger")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LedgerError(
            f"{path}: a line could not be added ({error.strerror}); the rollout ledger is as it "
            "was before: see to it that it can be written, and go on from the last checkpoint"
        ) from error


def _mend(path: Path, first_key: str) -> str | None:
    kept: list[str] = []
    torn: list[int] = []
    for line in lines_of(path, first_key):
        kept += [json.dumps(values, separators=(",", ":")) + "\n" for values in line.values]
        if not line.is_whole:
            torn.append(line.number)
    if not torn:
        return None
    real = Path(os.path.realpath(path))  # a link goes on to lead there
    replace_text(real, "".join(kept), "ledger-mend", real.with_name(f"{TEMPORARY}{real.name}"))
    numbers = ", ".join(map(str, torn))
    return (
        f"{path}: line{'s' if len(torn) > 1 else ''} {numbers} of the rollout ledger had been torn "
        "by a kill or a full disk and is mended; the steps in question are trained and noted again"
    )


def _objects(text: str, first_key: str) -> tuple[tuple[dict[str, Any], ...], bool]:
    """The objects in a line, and whether it is one and nothing else."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    found: list[dict[str, Any]] = []
    start, rest = 0, 0
    while start >= 0 and start < len(text):
        try:
            values, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            values, end = None, start + 1
        if isinstance(values, dict) and first_key in values:
            found.append(values)
            rest += end - start
        else:
            end = start + 1
        start = end if text.startswith("{", end) else text.find(f'{{"{first_key}"', end)
    return tuple(found), rest == len(text) and len(found) == 1

"""Megatron's lines go to a file, so that the plugin's, the script's and all errors can be seen.

Who printed a line decides: the function that called print, warnings or logging. Only Python's two
streams are sieved; what C code writes, the interpreter's own tracebacks included, is never touched.
A line of Megatron is shown all the same if it speaks of an error, a checkpoint or an evaluation, if
its logging level is ERROR, or if it is about an iteration that the plugin has no line for.

One file per rank, in a folder `megatron-log` beside --step-report or in --save, else in a folder of
its own among the system's temporary files.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from megatron_dynbatch.output import progress

FOLDER = "megatron-log"
# Their start-up lines; other packages and the script itself are shown.
_SIEVED = re.compile(r"(megatron|torch|transformer_engine|apex)(\.|$)")
_PASSED_ON = re.compile(r"(logging|warnings|typing_extensions|contextlib|functools)(\.|$)")
# Functions of Megatron that print what their caller gives them.
_PRINTERS = re.compile(r"print_rank|print_with_rank|log_single_rank|log_on_each|print_.*last_rank")
_ALWAYS_SHOWN = re.compile(
    r"\b(errors?|\w*Error|\w*Exception|exceptions?|traceback|fatal|fail(s|ed|ure|ures)?|abort(ed)?"
    r"|nan|overflow|checkpoints?)\b|loss at ",
    re.IGNORECASE,
)
# ... but not in the list of all arguments, whose names hold such words.
_ARGUMENT = re.compile(r"\s+\w+ \.\.+ |\s+\w+  \S")
_ITERATION = re.compile(r".*\biteration\s+\d+/", re.DOTALL)

_log: TextIO | None = None


def start(arguments: Sequence[str], folder: str | None = None) -> Path | None:
    """Sieve the streams of this process from now on.

    Args:
        arguments: Of the script; they say where its results go.
        folder: Where the file goes instead.

    Returns:
        The file that gets Megatron's lines; None where none can be written, and all is shown.
    """
    global _log
    rank = os.environ.get("RANK", "0")
    path = Path(folder) if folder is not None else log_folder(arguments)
    path /= f"rank-{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.parent.stat().st_uid != os.getuid():
            raise PermissionError(f"{path.parent} belongs to somebody else")
        _log = path.open("w", encoding="utf-8", errors="replace", buffering=1)
    except OSError as error:
        print(f"[megatron_dynbatch] Megatron's lines are shown: {error}", file=sys.stderr)
        return None
    sys.stdout = Sieve(sys.stdout, _log)
    sys.stderr = Sieve(sys.stderr, _log)
    if rank == "0":
        others = "" if os.environ.get("WORLD_SIZE", "1") == "1" else " (a file per rank)"
        progress(f"Megatron's own lines: {path}{others}; --verbose shows them here")
    return path


def is_on() -> bool:
    """Whether Megatron's lines go to a file."""
    return _log is not None


def stop() -> None:
    """Show everything again."""
    global _log
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, Sieve):
            setattr(sys, name, stream.shown)
    if _log is not None:
        _log.close()
    _log = None


def log_folder(arguments: Sequence[str]) -> Path:
    """Where the files go if nobody says."""
    given = dict(zip(arguments, arguments[1:], strict=False))
    given |= dict(word.split("=", 1) for word in arguments if re.match(r"--[\w-]+=", word))
    if report := given.get("--step-report"):
        return Path(report).parent / FOLDER
    if save := given.get("--save"):
        return Path(save) / FOLDER
    # The ranks that one torchrun started have it as their parent.
    run = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return Path(tempfile.gettempdir()) / f"megatron-dynbatch-{os.getuid()}-{run}" / FOLDER


class Sieve:
    """A text stream that writes some lines to another one.

    Args:
        shown: The stream that people see.
        hidden: Gets Megatron's lines.
    """

    def __init__(self, shown: TextIO, hidden: TextIO) -> None:
        self.shown = shown
        self._hidden = hidden
        self._last = threading.local()

    def __getattr__(self, name: str) -> object:
        return getattr(self.shown, name)

    def write(self, text: str) -> int:
        """Write to one of the two; the end of a line goes where the line went."""
        if text != "\n":
            self._last.is_shown = is_shown(text, _caller())
        if getattr(self._last, "is_shown", True):
            return self.shown.write(text)
        try:
            return self._hidden.write(text)
        except (OSError, ValueError):  # the disk is full, or the file was closed at exit
            return self.shown.write(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write several."""
        for line in lines:
            self.write(line)


def _caller() -> FrameType | None:
    """Whoever called `Sieve.write`; None: the interpreter itself."""
    try:
        return sys._getframe(2)
    except ValueError:
        return None


def is_shown(text: str, frame: FrameType | None) -> bool:
    """Whether people see a text.

    Args:
        text: What is written.
        frame: Of the function that writes it.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        record = frame.f_locals.get("record")
        if isinstance(record, logging.LogRecord) and record.levelno >= logging.ERROR:
            return True
        if not _PASSED_ON.match(module) and not _PRINTERS.match(frame.f_code.co_name):
            break
        frame = frame.f_back
    if frame is None or not _SIEVED.match(module):
        return True
    if _ITERATION.match(text):
        return not _has_own_lines()
    return bool(_ALWAYS_SHOWN.search(text)) and not _ARGUMENT.match(text)


def _has_own_lines() -> bool:
    hooks = sys.modules.get("megatron_dynbatch.hooks.session")
    return hooks is not None and hooks.session() is not None

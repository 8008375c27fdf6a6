"""What writers that died left behind goes; nobody who lives loses anything.

A leftover of this kernel is one that nobody holds (`hidden`). One of another machine, without a
kernel in its name (an older version's), or where there are no locks, is one that did not change for
a day, by the file system's own time. Should its writer live all the same, it loses time only: a
leftover is first moved away as a whole, so that it cannot appear as a batch any more, and a writer
that misses its folder fills a new one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from megatron_dynbatch.output import progress
from megatron_dynbatch.rollouts.files import move, remove_folder
from megatron_dynbatch.rollouts.hidden import (
    TEMPORARY,
    hidden_name,
    is_held,
    is_of_this_kernel,
)
from megatron_dynbatch.rollouts.slots import NOTES

LEASE_SECONDS = 86400.0


def sweep(directory: Path, now: float | None = None) -> None:
    """Removes leftovers of batches and notes, and says how many in a line each; never an error.

    Args:
        directory: A rollout directory.
        now: The file system's time, that of something just made; None: it is not known, and only
            what was left on this machine goes.
    """
    _sweep(directory, now)
    if not (directory / NOTES).is_symlink():  # a link may lead to what is not ours
        _sweep(directory / NOTES, now)


def _sweep(folder: Path, now: float | None) -> None:
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(TEMPORARY)]
    num_removed = 0
    for name in names:
        if _is_dead(folder / name, now):
            with suppress(OSError):  # another one was faster, or the file system refuses
                taken = folder / hidden_name()
                move(folder / name, taken, "leftover-move")
                remove_folder(taken, "leftover")
                num_removed += not taken.exists()
    if num_removed:
        what = "a leftover" if num_removed == 1 else f"{num_removed} leftovers"
        are = "is" if num_removed == 1 else "are"
        progress(f"{what} of writers that died {are} removed from {folder}")


def _is_dead(path: Path, now: float | None) -> bool:
    if path.is_symlink():
        return False
    if is_of_this_kernel(path.name) and (is_alive := is_held(path)) is not None:
        return not is_alive
    if now is None:
        return False
    try:
        times = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)]
    except NotADirectoryError:
        times = []
    except OSError:
        return False
    with suppress(OSError):
        return now - max([path.stat().st_mtime, *times]) > LEASE_SECONDS
    return False

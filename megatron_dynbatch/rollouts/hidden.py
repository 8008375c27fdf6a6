"""Names of what is not finished, and the lock by which its writer shows that it lives.

The name says on which running kernel the writer is (its boot id, hashed), and the writer holds an
advisory lock (`flock`) on the file or folder itself. Locks of one kernel are exact on every file
system, also for a process that is stopped, and end with the process. Between machines they are not
(NFS keeps those of folders to itself), which is why the name says where the lock can be asked for.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp-"
"""Names of what is not finished begin with it."""


@functools.cache
def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = uuid.uuid4().bytes  # no other process has it: nobody asks for locks here
    return hashlib.blake2b(boot, digest_size=4).hexdigest()


def hidden_name() -> str:
    """A new name."""
    return f"{TEMPORARY}{_kernel()}-{uuid.uuid4().hex}"


def is_of_this_kernel(name: str) -> bool:
    """Whether the lock on what has that name tells if its writer lives."""
    return name.startswith(f"{TEMPORARY}{_kernel()}-")


def lock(descriptor: int) -> None:
    """Locks an open file or folder until it is closed, where the file system has locks."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """A context in which this process is seen to work on a folder.

    Raises:
        FileNotFoundError: The folder is not there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool | None:
    """Whether a process of this kernel works on it; None if that cannot be known."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)
    return False

"""Places at which a test can end the process or fill the disk: every durable write has some.

Test only. `MEGATRON_DYNBATCH_FAILPOINT=NAME:POSITION:PASSAGE:ACTION[:RANK]` arms one place, for
example `part:middle:2:kill` or `ledger:before:1:enospc:0`:

    NAME      one of `WRITES`
    POSITION  before | middle | after; middle: half of the bytes are on disk (a torn write)
    PASSAGE   1 for the first time that the process comes there, 2 for the second…
    ACTION    kill (SIGKILL) | term (SIGTERM) | enospc (OSError, as of a full disk)
    RANK      only in the process whose environment has this RANK

With `MEGATRON_DYNBATCH_FAILPOINT_DONE=FILE` it acts once in a job that is started again: FILE is
made then, and where it is there nothing happens. Not armed, `reached` and `torn` do nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

VARIABLE = "MEGATRON_DYNBATCH_FAILPOINT"
DONE_VARIABLE = "MEGATRON_DYNBATCH_FAILPOINT_DONE"

CONTENT = ("before", "middle", "after")
ENTRY = ("before", "after")

WRITES: Mapping[str, tuple[str, ...]] = {
    # A rollout directory, in the order in which a writer makes it.
    "directory": ENTRY,
    "marker": CONTENT,
    "marker-move": ENTRY,
    "slot": ENTRY,  # the hidden folder of a batch or of the end
    "part": CONTENT,
    "index": CONTENT,
    "manifest": CONTENT,
    "plan": CONTENT,
    "key": CONTENT,
    "end": CONTENT,
    "batch": ENTRY,  # the move that makes a batch, or the end, appear
    "slot-removal": ENTRY,
    "notes": ENTRY,  # the folder of notes
    "note": CONTENT,
    "note-move": ENTRY,
    # Retention.
    "deletion-mark": CONTENT,
    "deletion": ENTRY,
    # What writers that died left.
    "leftover-move": ENTRY,
    "leftover": ENTRY,
    # The ledger: made ready before training, and a line after each step.
    "ledger-probe": CONTENT,
    "ledger-cut": ENTRY,
    "ledger-mend": CONTENT,
    "ledger-mend-move": ENTRY,
    "ledger": CONTENT,
    # Megatron's own, where a kill left it empty.
    "tracker-mend": CONTENT,
    "tracker-mend-move": ENTRY,
}
"""Each durable write of the package, and the positions at which it can be stopped."""

ACTIONS = ("kill", "term", "enospc")


@dataclass
class Failpoint:
    """One place, and what happens there.

    Attributes:
        name: One of `WRITES`.
        position: One of the positions of that write.
        passage: Which time, from 1.
        action: One of `ACTIONS`.
        rank: Only where the environment's RANK is this; None: everywhere.
        done: A file that is made when it acts, and keeps it from acting again.
    """

    name: str
    position: str
    passage: int
    action: str
    rank: str | None = None
    done: str | None = None
    _passages: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.position not in WRITES.get(self.name, ()) or self.action not in ACTIONS:
            raise ValueError(
                f"{VARIABLE}: there is no {self.name}:{self.position}:…:{self.action}; give "
                f"NAME:POSITION:PASSAGE:ACTION[:RANK] with a name and position of {dict(WRITES)} "
                f"and one of {', '.join(ACTIONS)}"
            )

    @classmethod
    def parse(cls, text: str, done: str | None = None) -> Failpoint:
        """Of the text of the environment variable.

        Raises:
            ValueError: It names no place or action.
        """
        parts = text.split(":")
        if len(parts) not in (4, 5) or not parts[2].isdecimal():
            raise ValueError(f"{VARIABLE}={text}: give NAME:POSITION:PASSAGE:ACTION[:RANK]")
        name, position, passage, action = parts[:4]
        rank = parts[4] if len(parts) == 5 else None
        return cls(name, position, int(passage), action, rank, done)

    def reached(self, name: str, position: str) -> None:
        """Acts if this is the place."""
        if self._is_now(name, position):
            self._act()

    def torn(self, name: str, descriptor: int, start: int = 0) -> None:
        """Acts if this is the place, when half of what was written after `start` is left.

        Args:
            name: The write.
            descriptor: Of a file that was written to its end.
            start: Its size before.
        """
        if self._is_now(name, "middle"):
            os.ftruncate(descriptor, start + (os.fstat(descriptor).st_size - start) // 2)
            os.fsync(descriptor)
            self._act()

    def _is_now(self, name: str, position: str) -> bool:
        if (name, position) != (self.name, self.position):
            return False
        if self.rank is not None and os.environ.get("RANK", "0") != self.rank:
            return False
        self._passages += 1
        return self._passages == self.passage and not self._is_done()

    def _is_done(self) -> bool:
        if self.done is None:
            return False
        try:
            os.close(os.open(self.done, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True
        return False

    def _act(self) -> None:
        where = f"{self.name}:{self.position}:{self.passage}:{self.action}"
        print(f"[megatron_dynbatch] failpoint {where}", file=sys.stderr, flush=True)
        if self.action == "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGTERM)


def _nothing(*_: object) -> None:
    return None


reached: Callable[[str, str], None] = _nothing
"""Called before and after a durable write: (name, position)."""
torn: Callable[..., None] = _nothing
"""Called in the middle of one: (name, descriptor, size of the file before)."""


def arm(failpoint: Failpoint | None) -> None:
    """Arms a place, or none."""
    global reached, torn
    reached = _nothing if failpoint is None else failpoint.reached
    torn = _nothing if failpoint is None else failpoint.torn


if VARIABLE in os.environ:
    arm(Failpoint.parse(os.environ[VARIABLE], os.environ.get(DONE_VARIABLE)))

"""A pretrain script that torchrun starts, and that dies once at a chosen point (see `kills`)."""

from __future__ import annotations

import os
from pathlib import Path

from tests.parity.own_script import main
from tests.reliability.kills import Kill

KILL = "DYNBATCH_TEST_KILL"


def set_trap(text: str) -> None:
    """Set the trap of ``point|nth|ranks|mark``, unless somebody died in it before."""
    point, nth, ranks, mark = text.split("|")
    if not Path(mark).exists():
        Kill(point, int(nth), tuple(map(int, ranks.split(","))), mark)()


if __name__ == "__main__":
    if KILL in os.environ:
        set_trap(os.environ[KILL])
    main()

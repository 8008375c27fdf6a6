"""A run's batches from writers that die at every place of theirs, one after the other.

    python -m tests.reliability.writers_under_fire DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megatron_dynbatch import failpoints
from megatron_dynbatch.failpoints import ACTIONS, WRITES, Failpoint
from megatron_dynbatch.rollouts import RolloutDirectory
from tests.parity.rollouts import make_steps, to_sample

BATCHES = (4,) * 10
"""Rollouts of each batch of the run; more than writers that die when a batch has appeared."""
SEED = 2

# A writer that dies at one of these leaves a batch; at the others the next one writes it again.
LEAVING = ("slot-removal", "batch")
WRITER = [
    name for name in WRITES if not name.startswith(("ledger", "deletion", "tracker", *LEAVING))
]


DIES = "slot:after:1:kill"
"""Leaves a hidden folder."""

# What a full disk does not let a writer remove is no reason to stop.
TOLERATED = ("slot-removal:before:1:enospc", "leftover-move:before:1:enospc",
             "leftover:before:1:enospc")  # fmt: skip


def places() -> list[str]:
    """All of a writer's, in an order in which each is passed: END comes last."""
    first = ["directory", "marker", "marker-move", "notes"]
    names = [*first, *(n for n in WRITER if n not in (*first, "end")), *LEAVING, "end"]
    return [
        place
        for name in names
        for at in WRITES[name]
        for action in ACTIONS
        if (action, at) != ("enospc", "after")
        and (name not in ("marker-move", "notes") or (at, action) != ("after", "term"))  # made once
        for place in [
            *([DIES] if name.startswith("leftover") else []),  # somebody must have left something
            f"{name}:{at}:1:{action}",
        ]
    ]


def write(path: Path, place: str) -> None:
    """One writer: notes, and the next batch that is not there; with the last places all and END."""
    failpoints.arm(Failpoint.parse(place) if place else None)
    directory = RolloutDirectory(path)
    directory.publish("writer", "is there")
    is_last = not place or place.startswith("end")
    for number, batch in enumerate(make_steps(BATCHES, seed=SEED)):
        if directory.state(number) == "present" and not is_last:
            continue
        samples = [to_sample(example) for example in batch]
        directory.write(samples, "no plan", key=f"batch {number}")
        if not is_last:
            return
    if directory.num_batches_if_finished() is None:
        directory.finish()


def main() -> None:
    """See the module."""
    path, lived = Path(sys.argv[1]), []
    for place in [*places(), ""]:
        child = os.fork()  # no thread of pyarrow runs yet
        if child == 0:
            code = 1
            try:
                write(path, place)
                code = 0
            except OSError:
                code = 2
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 2, -signal.SIGKILL, -signal.SIGTERM), (place, code)
        if code == 0:
            lived.append(place)
    assert sorted(lived) == sorted([*TOLERATED, ""]), f"these were not stopped: {lived}"


if __name__ == "__main__":
    main()

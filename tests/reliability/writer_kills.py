"""A writer's whole life, stopped at one place after another; each in a process of its own.

    python -m tests.reliability.writer_kills FOLDER PLACE…

forks a child for each PLACE (NAME:POSITION:PASSAGE:ACTION), which works in FOLDER/PLACE until the
place stops it, and prints the exit codes as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from megatron_dynbatch import failpoints
from megatron_dynbatch.rollouts import RolloutDirectory, Sample

NUM_BATCHES = 3
KEYS = ("a", "b", "c")


def samples(batch: int) -> list[Sample]:
    """Of one batch: five, of which each names batch and row."""
    return [Sample([100 + batch, row, 7], 2, rollout_id=row) for row in range(5)]


def live(path: Path) -> None:
    """Notes, three planned batches with keys, END, and the deletion of the first two batches."""
    directory = RolloutDirectory(path)
    directory.publish("progress", "0")
    for batch in range(NUM_BATCHES):
        directory.write(samples(batch), f"plan {batch}", parts=[[0, 1], [2, 3]], key=KEYS[batch])
        directory.publish("progress", str(batch))
    if directory.num_batches_if_finished() is None:
        directory.finish()
    directory.delete_before(2)


def main() -> None:
    """See the module."""
    folder, codes = Path(sys.argv[1]), {}
    for place in sys.argv[2:]:
        child = os.fork()  # no thread of pyarrow runs yet
        if child == 0:
            failpoints.arm(failpoints.Failpoint.parse(place))
            code = 1
            try:
                live(folder / place)
                code = 0
            except OSError as error:
                print(place, repr(error), file=sys.stderr)
                code = error.errno or 1
            finally:
                sys.stderr.flush()
                os._exit(code)
        codes[place] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(codes))


if __name__ == "__main__":
    main()

"""A life of durable writes, stopped at one place after another; each in a process of its own.

    python -m tests.reliability.writer_kills MODULE:FUNCTION FOLDER PLACE…

forks a child for each PLACE (NAME:POSITION:PASSAGE:ACTION), which calls the function with
FOLDER/PLACE until the place stops it, and prints the exit codes as JSON. Only what the function
writes matters, so it needs no thread.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_dynbatch import failpoints
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from tests.pool import ROOT

NUM_BATCHES = 3
KEYS = ("a", "b", "c")
PROGRESS = ("at batch 0", "at batch 1", "at batch 2")


def samples(batch: int) -> list[Sample]:
    """Of one batch: five, of which each names batch and row."""
    return [Sample([100 + batch, row, 7], 2, rollout_id=row) for row in range(5)]


def live(path: Path) -> None:
    """Notes, three planned batches with keys, END, and the deletion of the first two batches."""
    directory = RolloutDirectory(path)
    directory.publish("progress", PROGRESS[0])
    for batch in range(NUM_BATCHES):
        directory.write(samples(batch), f"plan {batch}", parts=[[0, 1], [2, 3]], key=KEYS[batch])
        directory.publish("progress", PROGRESS[batch])
    if directory.num_batches_if_finished() is None:
        directory.finish()
    directory.delete_before(2)


def stopped(function: str, folder: Path, where: list[str]) -> dict[str, int]:
    """Exit codes of children stopped at these places."""
    command = [sys.executable, "-m", "tests.reliability.writer_kills", function, str(folder)]
    done = subprocess.run([*command, *where], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """See the module."""
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    folder, codes = Path(sys.argv[2]), {}
    for place in sys.argv[3:]:
        child = os.fork()  # no thread of pyarrow runs yet
        if child == 0:
            failpoints.arm(failpoints.Failpoint.parse(place))
            code = 1
            try:
                function(folder / place)
                code = 0
            except OSError as error:
                code = getattr(error.__cause__ or error, "errno", None) or 1
            finally:
                os._exit(code)
        codes[place] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(json.dumps(codes))


if __name__ == "__main__":
    main()

"""How much memory reading takes, in a process of its own.

    python -m tests.reliability.peak DIR…

reads row 0 of batch 0 of each rollout directory and prints what the resident memory rose by at
most, and the error that it ended with, as a line of JSON each.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.rollouts import RolloutDirectory
from tests.rollouts.helpers import random_samples


def _kilobytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0])


def main() -> None:
    """Read what the command line asks for."""
    with tempfile.TemporaryDirectory() as folder:  # imports and pools out of the way
        warm = RolloutDirectory(folder)
        warm.write(random_samples(20, seed=0))
        warm.read(0, [3])
    for path in sys.argv[1:]:
        directory, error = RolloutDirectory(path, open_timeout=0.0), None
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = _kilobytes("VmRSS")
        try:
            directory.read(0, [0])
        except DynbatchError as caught:
            error = str(caught)
        print(json.dumps([1024 * (_kilobytes("VmHWM") - before), error]))


if __name__ == "__main__":
    main()

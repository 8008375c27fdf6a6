"""One DP2 cell by itself, for another Megatron than the environment's:

    PYTHONPATH=DIR python -m tests.parity.smoke

DIR is where that version was installed (pip install --no-deps --target DIR megatron-core==…).
Prints the version and the largest deviations as JSON.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.parity.compare import deviations
from tests.parity.job import Cell, note_version, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, train
from tests.parity.rollouts import batch_flags, make_steps, write_batches


def main() -> None:
    """Train, compare, print."""
    layout, recipe = Layout(dp=2), Recipe()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts"
        write_batches(path, make_steps())
        flags = {**batch_flags(path), **layout.flags()}
        observed = run_cell(Cell(layout.ranks, flags, recipe, prepare=note_version))
    found = deviations(observed, train(make_steps(), recipe), tensors=False)
    print(json.dumps({"version": observed[0].notes[0], **found}))


if __name__ == "__main__":
    main()

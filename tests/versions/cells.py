"""Trainings in the Megatron that is first on the path, compared with the independent loop.

    PYTHONPATH=DIR python -m tests.versions [--bare] CELL …

DIR is where that version was installed (pip install --no-deps --target DIR megatron-core==…).
Prints one JSON object: version and place of Megatron, and for each cell the largest deviations and
the logged rows of its last rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.parity.compare import deviations
from tests.parity.job import NOTES, Cell, Observed, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, train
from tests.parity.rollouts import CAPACITY, STEP_SIZES, batch_flags, make_steps, write_batches

RECIPE = Recipe()


def note_megatron() -> None:
    """Note version and place of this rank's Megatron, and whether its functions were changed."""
    import megatron.core
    from megatron.core.package_info import __version__
    from megatron.training import training

    code = training.train.__code__
    NOTES.append((__version__, str(Path(megatron.core.__file__).parents[2]), code.co_names))


def at_layout(layout: Layout) -> Callable[[Path, bool], list[list[Observed]]]:
    """Six steps of different sizes under a layout."""

    def run(path: Path, plugin: bool) -> list[list[Observed]]:
        flags = {**batch_flags(path), **layout.flags()}
        return [run_cell(Cell(layout.ranks, flags, RECIPE, plugin=plugin, prepare=note_megatron))]

    return run


def resumed(path: Path, plugin: bool) -> list[list[Observed]]:
    """The same steps, saved after the second and gone on with in new processes."""
    with tempfile.TemporaryDirectory() as folder:
        # In 0.17 the other format leaves a writer process behind, which keeps our pipes open.
        flags = {**batch_flags(path), "ckpt-format": "torch"}
        first = {**flags, "save": folder, "save-interval": 100, "exit-interval": 2}
        second = {**flags, "load": folder}
        cell = Cell(1, first, RECIPE, plugin=plugin, prepare=note_megatron)
        return [
            run_cell(cell),
            run_cell(Cell(1, second, RECIPE, plugin=plugin, overwrite_weights=False)),
        ]


def beyond_train_iters(path: Path, plugin: bool) -> list[list[Observed]]:
    """More steps than samples / step size: Megatron's own number of iterations is no bound."""
    flags = {**batch_flags(path), "rollouts-per-step": 9, "max-tokens-per-gpu": CAPACITY}
    return [run_cell(Cell(1, flags, RECIPE, plugin=plugin, prepare=note_megatron))]


def skipped(path: Path, plugin: bool) -> list[list[Observed]]:
    """The third step is skipped: its rollouts count, nothing is trained."""
    flags = {**batch_flags(path), "iterations-to-skip": 3}
    return [run_cell(Cell(1, flags, RECIPE, plugin=plugin, prepare=note_megatron))]


CELLS: dict[str, Callable[[Path, bool], list[list[Observed]]]] = {
    "DP2": at_layout(Layout(dp=2)),
    "PP2": at_layout(Layout(pp=2)),
    "resume": resumed,
    "beyond": beyond_train_iters,
    "skipped": skipped,
}
# Cells that train the reference's steps.
COMPARED = ("DP2", "PP2", "resume")


def joined(parts: Sequence[list[Observed]]) -> list[Observed]:
    """The runs of one cell as one."""
    whole = parts[0]
    for part in parts[1:]:
        for rank, observed in enumerate(part):
            for name in ("rows", "learning_rates", "weight_decays", "gradients", "parameters"):
                getattr(whole[rank], name).extend(getattr(observed, name))
    return whole


def main() -> None:
    """Train the cells, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    parser.add_argument("--bare", action="store_true", help="do not install the hooks")
    parser.add_argument("cells", nargs="+", choices=CELLS)
    args = parser.parse_args()
    reference = train(make_steps(), RECIPE)
    answer: dict[str, Any] = {"cells": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts"
        write_batches(path, make_steps())
        for name in args.cells:
            observed = joined(CELLS[name](path, not args.bare))
            answer["version"], answer["place"], names = observed[0].notes[0]
            answer["changed"] = "__dynbatch_sites__" in names
            found = {}
            if name in COMPARED:
                found = deviations(observed, reference, tensors=False)
            answer["cells"][name] = {"deviations": found, "rows": observed[-1].rows}
    answer["steps"] = list(STEP_SIZES)
    print(json.dumps(answer))

"""``python -m tests.versions.table``: run every tested version and write docs/versions.md.

``--checkout DIR`` (repeatable) runs a checkout too; it needs what that version imports, and the
compiled dataset helpers. With ``--repository MEGATRON_LM`` (a git clone) the table also says of
other releases and branches whether every site and seam matches in their source; those are not run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path

from megatron_dynbatch.cli import source_patch
from megatron_dynbatch.cli.tree import Tree
from megatron_dynbatch.versions import TESTED_PACKAGES
from patches.generate import TAGS, check_out
from tests.pool import ROOT
from tests.versions.cells import COMPARED
from tests.versions.test_versions import root_of, run_cells

TARGET = ROOT / "docs" / "versions.md"
BRANCHES = ("refs/heads/main", "refs/heads/dev")

HEAD = f"""\
# Versions that were run

Written by `python -m tests.versions.table`, with torch {installed_version("torch")}. Steps of
different sizes under two data-parallel ranks, two pipeline stages, and through a save and a resume,
in the real Megatron on the CPU. Numbers are the largest relative deviation of loss and of gradient
norm from an independent training loop. *Patched*: a copy with the source patch and without
`install()` logs the same numbers to the last bit.

| megatron-core | {" | ".join(COMPARED)} | patched |
|---|{"---|" * len(COMPARED)}---|
"""
UNRUN = """
## Read, not run

| source | megatron-core | sites and seams |
|---|---|---|
"""


def row(root: Path, source: str) -> str:
    """The line of one Megatron."""
    hooked = run_cells(root)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(root / "megatron", Path(folder) / "megatron")
        tree = Tree(Path(folder))
        for name, text in source_patch.patched(tree).items():
            (tree.root / tree.module(name).file).write_text(text, encoding="utf-8")
        same = run_cells(tree.root, "--bare")["cells"] == hooked["cells"]
        label = tree.label
    numbers = [hooked["cells"][name]["deviations"] for name in COMPARED]
    cells = [f"{found['metrics']:.0e} / {found['grad norm']:.0e}" for found in numbers]
    return f"| {label} ({source}) | {' | '.join(cells)} | {'the same' if same else 'DIFFERS'} |\n"


def read(repository: Path, reference: str) -> str:
    """A line about a source tree that was not run."""
    with tempfile.TemporaryDirectory() as folder:
        check_out(repository, reference, Path(folder))
        tree = Tree(Path(folder))
        state = "; ".join(tree.problems()) or "match"
        name = reference.removeprefix("refs/heads/")
        return f"| `{name}` | {tree.label} | {state} |\n"


def main() -> None:
    """Run, read, write."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions.table")
    parser.add_argument("--checkout", type=Path, action="append", default=[])
    parser.add_argument("--repository", type=Path)
    args = parser.parse_args()
    rows = [row(checkout.resolve(), "checkout") for checkout in args.checkout]
    rows += [row(root_of(version), "package") for version in TESTED_PACKAGES]
    text = HEAD + "".join(sorted(rows))
    if args.repository:
        text += UNRUN + "".join(read(args.repository, name) for name in (*TAGS, *BRANCHES))
    TARGET.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

"""Write the ready-made patches anew: after a change of the registry, or for a new release.

    python patches/generate.py [--repository MEGATRON_LM]

Takes the released packages from .venv/megatron-core-VERSION or the environment, and with
--repository (a git clone of Megatron-LM) also the releases that are only there.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
import tempfile
from pathlib import Path

from megatron_dynbatch.cli import source_patch
from megatron_dynbatch.cli.sites import installed_root
from megatron_dynbatch.cli.tree import Tree
from megatron_dynbatch.versions import TESTED_PACKAGES

FOLDER = Path(__file__).parent
# Their packages on PyPI have no training loop, so they are used as checkouts.
TAGS = ("core_v0.14.0", "core_v0.15.3", "core_v0.16.1")


def write(tree: Tree) -> None:
    """One patch."""
    target = FOLDER / f"megatron-core-{tree.label}.patch"
    target.write_text(source_patch.diff(tree), encoding="utf-8")
    print(target.name)


def released(version: str) -> Path:
    """Folder of a released package."""
    installed = installed_root()
    if installed is not None and Tree(installed).label == version:
        return installed
    return FOLDER.parent / ".venv" / f"megatron-core-{version}"


def check_out(repository: Path, tag: str, folder: Path) -> None:
    """Put the tag's ``megatron`` into a folder."""
    archive = subprocess.run(
        ["git", "-C", str(repository), "archive", tag, "megatron"], capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def main() -> None:
    """Write them all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repository", type=Path)
    repository = parser.parse_args().repository
    for version in TESTED_PACKAGES:
        write(Tree(released(version)))
    for tag in TAGS if repository else ():
        with tempfile.TemporaryDirectory() as folder:
            check_out(repository, tag, Path(folder))
            write(Tree(Path(folder)))


if __name__ == "__main__":
    main()

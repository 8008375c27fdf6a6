"""``megatron-dynbatch examples``: the example scripts, whole, for whoever installed the package."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import megatron_dynbatch
from megatron_dynbatch.errors import OptionError

DESCRIPTION = """\
Copies scripts into DIR/examples, complete ones for Megatron's pretrain, a loop of your own, GRPO in
turns and with Ray, and the demo. Commands that begin with `examples` in this package's pages run in
DIR then, as they do in a checkout.
"""
EXAMPLES = """\
  megatron-dynbatch examples .
  megatron-dynbatch examples ~/dynbatch"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("."), metavar="DIR",
        help="where to put the folder `examples` (default: here)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Copy them.

    Raises:
        OptionError: The folder is there already; nothing was written.
    """
    target = args.folder / "examples"
    if target.exists() or target.is_symlink():
        raise OptionError(f"{target} is there already: give another DIR, or remove it first")
    source = examples_folder()
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, target, ignore=ignore)
    names = sorted(path.name for path in target.iterdir() if path.suffix in (".py", ".sh"))
    shown = [name for name in names if not name.startswith("__")]
    print(f"{target}: {', '.join(shown)}, and the demo")
    return 0


def examples_folder() -> Path:
    """The examples in the installed package, or those of the checkout that it is imported from."""
    package = Path(megatron_dynbatch.__file__).parent
    installed = package / "share" / "examples"
    return installed if installed.is_dir() else package.parent / "examples"

"""``megatron-dynbatch run``: the launcher of `megatron_dynbatch.run` under the command's name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_dynbatch import run as launcher

DESCRIPTION = "Runs a pretrain script, unmodified, with the plugin installed."
EXAMPLES = launcher.EXAMPLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What stands before the script; for completion, the launcher parses by itself."""
    parser.add_argument("--cpu", action="store_true", help="run on the CPU, over gloo")
    parser.add_argument("--verbose", action="store_true", help="show all that Megatron prints")
    parser.add_argument("--log-dir", metavar="DIR", help="where Megatron's lines go otherwise")
    parser.add_argument("--module", metavar="NAME", help="run a module, like python -m")
    parser.add_argument("script", nargs="?", help="the pretrain script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script, Megatron's too")


def run(args: argparse.Namespace) -> int:
    """Run what the arguments name."""
    flags = ["--cpu"] * args.cpu + ["--verbose"] * args.verbose
    for flag, value in (("--log-dir", args.log_dir), ("--module", args.module)):
        flags += [flag, value] if value else []
    return launch([*flags, *filter(None, [args.script]), *args.arguments])


def launch(argv: Sequence[str]) -> int:
    """Run a script or a module in this process; returns its exit code."""
    # What python -m puts there; a console script has the folder of the command instead.
    if not sys.flags.safe_path:
        sys.path[0] = ""
    return launcher.main(argv)

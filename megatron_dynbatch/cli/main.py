"""``megatron-dynbatch``: one subcommand per module of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_dynbatch._version import __version__
from megatron_dynbatch.cli import doctor, patch, plan, sites, verify

# Each has add_parser(subparsers), which sets `run`, a function from arguments to exit code.
COMMANDS = (plan, verify, doctor, patch, sites)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        Exit code: 0 if all is well, 1 if the command found something wrong, 2 for wrong usage.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["run"]:
        return _launch(given[1:])
    args = _parser().parse_args(given)
    try:
        return int(args.run(args))
    except ValueError as error:
        print(f"megatron-dynbatch {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dynbatch", description="Tools of megatron_dynbatch."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "run", help="run a pretrain script with the plugin, like python -m megatron_dynbatch.run"
    )
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def _launch(argv: Sequence[str]) -> int:
    from megatron_dynbatch import run

    # What python -m puts there; a console script has the folder of the command instead.
    if not sys.flags.safe_path:
        sys.path[0] = ""
    return run.main(argv)


if __name__ == "__main__":
    sys.exit(main())

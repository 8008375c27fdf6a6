"""``megatron-dynbatch``: one subcommand per module of this package.

Only the module of the subcommand that was asked for is imported, so that help and mistakes answer
at once. Each module has DESCRIPTION and EXAMPLES for its help, ``add_arguments(parser)``, and
``run(args)``, which returns the exit code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from megatron_dynbatch._version import __version__


class Command(NamedTuple):
    """A subcommand: the module it lives in, and its line in the list of commands."""

    module: str
    help: str


COMMANDS = {
    "run": Command("launch", "run a pretrain script with the plugin, on GPUs or on a CPU"),
    "plan": Command("plan", "what a batch of rollouts becomes under a parallel layout"),
    "fit-cost": Command("fit_cost", "fit the planner's cost model to measured times"),
    "verify": Command("verify", "is a script's loss the same however its data are split?"),
    "report": Command("report", "pictures and one HTML page about a training run"),
    "doctor": Command("doctor", "versions, hooks, other plugins, refused flags"),
    "patch": Command("patch", "the hooks as a source patch for a Megatron-LM checkout"),
    "sites": Command("sites", "which hooked places moved in another Megatron-LM tree"),
    "examples": Command("examples", "copy the example scripts into a folder"),
    "completion": Command("completion", "shell code that completes commands and flags"),
}

class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage of dozens of flags."""

    def error(self, message: str) -> NoReturn:
        """End the process with code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


EXAMPLES = """\
examples:
  megatron-dynbatch doctor
  megatron-dynbatch plan --distribution C --agentic --dp 8 --rollouts-per-step 64
  megatron-dynbatch report runs/demo/seed-1

COMMAND --help has more. Errors are one line; --debug adds where they come from.
Exit codes: 0 all is well, 1 something was found, 2 wrong usage, 3 a fault of the program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        Exit code: 0 if all is well, 1 if the command found something wrong, 2 for wrong usage or
        input, 3 for a fault of the program itself.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["run"]:  # what follows is Megatron's and the script's
        return importlib.import_module("megatron_dynbatch.cli.launch").launch(given[1:])
    parser = build_parser(given)
    if "_ARGCOMPLETE" in os.environ:
        _complete(build_parser(COMMANDS))
    args = parser.parse_args(given)
    try:
        return int(args.run(args))
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.debug:
            raise
        return _tell(args.command, error)


def build_parser(words: Sequence[str] | dict[str, Command]) -> argparse.ArgumentParser:
    """The parser.

    Args:
        words: Subcommands among them get their arguments; the others stand in the list only.
    """
    parser = Parser(
        prog="megatron-dynbatch",
        description="Megatron-LM training in which every step has its own global batch size.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        if name not in words:
            commands.add_parser(name, help=command.help)
            continue
        module = importlib.import_module(f"megatron_dynbatch.cli.{command.module}")
        own = commands.add_parser(
            name,
            help=command.help,
            description=module.DESCRIPTION,
            epilog="examples:\n" + module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        module.add_arguments(own)
        own.set_defaults(run=module.run)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that asks for completions; ends the process."""
    import argcomplete

    argcomplete.autocomplete(parser)


def _tell(command: str, error: Exception) -> int:
    """One line about an error; returns the exit code."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    expected = isinstance(error, (ValueError, OSError, ImportError))
    if not expected:
        text = f"{type(error).__name__}: {text} (a fault of the program; --debug shows where)"
    print(f"megatron-dynbatch {command}: {text}", file=sys.stderr)
    return 2 if expected else 3


if __name__ == "__main__":
    sys.exit(main())

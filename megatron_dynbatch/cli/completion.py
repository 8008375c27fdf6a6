"""``megatron-dynbatch completion``: code for the shell, which then completes commands and flags."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Prints code for a shell that completes the subcommands and flags of megatron-dynbatch.
Needs argcomplete: pip install 'megatron-dynbatch[completion]'
"""
EXAMPLES = """\
  eval "$(megatron-dynbatch completion bash)"                          # in ~/.bashrc
  eval "$(megatron-dynbatch completion zsh)"                           # in ~/.zshrc
  megatron-dynbatch completion fish > ~/.config/fish/completions/megatron-dynbatch.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(args: argparse.Namespace) -> int:
    """Print the code.

    Raises:
        ValueError: argcomplete is not installed.
    """
    try:
        import argcomplete
    except ImportError:
        raise ValueError(
            "argcomplete is not installed: pip install 'megatron-dynbatch[completion]'"
        ) from None
    print(argcomplete.shellcode(["megatron-dynbatch"], shell=args.shell))
    return 0

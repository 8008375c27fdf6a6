"""Run an unmodified pretrain script with the plugin installed.

    python -m megatron_dynbatch.run [options] script.py [arguments of the script …]
    python -m megatron_dynbatch.run [options] --module package.module [arguments …]
    torchrun --nproc-per-node N -m megatron_dynbatch.run …

The hooks are installed before the script is imported, so names that it imports from Megatron are
the hooked ones. The script sees `sys.argv`, `sys.path[0]` and `__main__` as if it had been started
directly; the plugin's flags are Megatron's and stand among the script's arguments. Megatron's own
lines go to a file (`quiet`) unless --verbose is given.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dynbatch import quiet
from megatron_dynbatch.errors import MissingPackage

USAGE = """\
usage: python -m megatron_dynbatch.run [options] script.py [arguments of the script …]
       python -m megatron_dynbatch.run [options] --module package.module [arguments …]

  --cpu            run the real Megatron on the CPU, over gloo
  --verbose        show all that Megatron prints, not only a line per step and errors
  --log-dir DIR    where Megatron's lines go otherwise (default: megatron-log beside --step-report
                   or in --save, else a temporary folder)
  --module NAME    run a module instead of a file, like python -m
  -h, --help       show this (after the script's name: the script's own help)
"""
EXAMPLES = """\
  torchrun --nproc-per-node 8 -m megatron_dynbatch.run pretrain_gpt.py --dynamic-global-batch \\
      --rollout-path DIR --rollouts-per-step 64 --max-tokens-per-gpu 8192 \\
      --attention-dropout 0 --hidden-dropout 0 ...
  megatron-dynbatch run --cpu examples/sft_varlen.py --help     # Megatron's flags, and ours"""


@dataclass(frozen=True)
class Launch:
    """What to run.

    Attributes:
        target: Path of a script, or dotted name of a module.
        is_module: Which of the two.
        arguments: Arguments of the script, untouched.
        cpu: Whether to run on the CPU.
        verbose: Whether all that Megatron prints is shown.
        log_dir: Folder for Megatron's lines; None: one is chosen.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    cpu: bool
    verbose: bool = False
    log_dir: str | None = None


def parse_launch(argv: Sequence[str]) -> Launch | None:
    """Split the launcher's options from the script and its arguments.

    Args:
        argv: Arguments without the program's name.

    Returns:
        What to run, or None if help was asked for.

    Raises:
        ValueError: An unknown option before the script, or no script.
    """
    cpu = verbose = False
    log_dir = module = None
    rest = list(argv)
    while rest and rest[0].startswith("-") and module is None:
        option = rest.pop(0)
        name, has_value, value = option.partition("=")
        if name in ("--module", "--log-dir") and not has_value and rest:
            value = rest.pop(0)
        if option in ("-h", "--help"):
            return None
        if option == "--cpu":
            cpu = True
        elif option == "--verbose":
            verbose = True
        elif name == "--log-dir":
            if not value:
                raise ValueError("--log-dir needs a folder")
            log_dir = value
        elif name == "--module":
            if not value:
                raise ValueError("--module needs the dotted name of a module")
            module = value
        else:
            raise ValueError(
                f"unknown option {option!r} before the script; options of the script and of "
                "Megatron stand after the script's name"
            )
    if module is not None:
        return Launch(module, True, tuple(rest), cpu, verbose, log_dir)
    if not rest:
        raise ValueError("no script given; say which file to run, or --module with a module's name")
    if not os.path.isfile(rest[0]):
        raise ValueError(f"there is no file {rest[0]!r} to run, seen from {os.getcwd()}")
    return Launch(rest[0], False, tuple(rest[1:]), cpu, verbose, log_dir)


def prepare(cpu: bool) -> None:
    """Stand in for the GPU if asked, then install the hooks.

    Args:
        cpu: Whether to run on the CPU.
    """
    if cpu:
        from megatron_dynbatch.cpu import enable

        enable()
    from megatron_dynbatch import hooks

    hooks.install()


@contextlib.contextmanager
def seen_by_target(launch: Launch) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as a direct start would; put them back afterwards.

    Args:
        launch: What is going to run.
    """
    argv, path = list(sys.argv), list(sys.path)
    try:
        sys.argv[:] = [launch.target, *launch.arguments]
        # python -m put the working directory there; a script finds its own folder.
        if not launch.is_module and not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(launch.target))
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


def run_target(launch: Launch) -> None:
    """Run the script or module as `__main__` in this process.

    Args:
        launch: What to run.
    """
    with seen_by_target(launch):
        if launch.is_module:
            runpy.run_module(launch.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(launch.target, run_name="__main__")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m megatron_dynbatch.run`.

    Args:
        argv: Arguments without the program's name; those of the process if None.

    Returns:
        Exit code.
    """
    try:
        launch = parse_launch(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"{USAGE}\nerror: {error}", file=sys.stderr)
        return 2
    if launch is None:
        print(f"{USAGE}\nexamples:\n{EXAMPLES}")
        return 0
    log = None if launch.verbose else quiet.start(launch.arguments, launch.log_dir)
    try:
        # A script inside a Megatron checkout must find that Megatron, and so must the hooks.
        with seen_by_target(launch):
            try:
                prepare(launch.cpu)
            except MissingPackage as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            run_target(launch)
    except BaseException as error:
        if log is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            print(f"[megatron_dynbatch] Megatron's own lines: {log}", file=sys.stderr)
        raise
    finally:
        quiet.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

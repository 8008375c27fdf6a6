"""Starts what `megatron_dynbatch.run --cpu` would, in processes of the pool."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from tests.pool import run_ranks


def launch(size: int, arguments: list[str], environment: Mapping[str, str] | None = None) -> None:
    """What `torchrun -m megatron_dynbatch.run --cpu` does with these arguments.

    Args:
        size: Processes.
        arguments: The script's name or --module NAME, and its flags.
        environment: Variables that the processes get, whatever they were forked from.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(size, _launch_rank, arguments, port, dict(environment or {}), process_group=False)


def _launch_rank(arguments: list[str], port: int, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    from megatron_dynbatch import hooks
    from megatron_dynbatch.run import parse_launch, run_target

    os.environ["MASTER_PORT"] = str(port)
    hooks.install()
    parsed = parse_launch(arguments)
    assert parsed is not None
    run_target(parsed)


def untrained(launch: list[str]) -> list[str]:
    """A command line of the demo's policy without its warm-up: from random weights."""
    start = launch.index("--load")
    rest = [flag for flag in launch[start + 2 :] if flag != "--finetune"]
    return launch[:start] + rest

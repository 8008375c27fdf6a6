"""Starts what `megatron_dynbatch.run --cpu` would, in a process of the pool."""

from __future__ import annotations


def launch_rank(arguments: list[str]) -> None:
    """What `megatron_dynbatch.run --cpu` does with these arguments."""
    from megatron_dynbatch import hooks
    from megatron_dynbatch.run import parse_launch, run_target

    hooks.install()
    launch = parse_launch(arguments)
    assert launch is not None
    run_target(launch)


def untrained(launch: list[str]) -> list[str]:
    """A command line of the demo's policy without its warm-up: from random weights."""
    start = launch.index("--load")
    rest = [flag for flag in launch[start + 2 :] if flag != "--finetune"]
    return launch[:start] + rest

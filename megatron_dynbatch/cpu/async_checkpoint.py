"""Asynchronous checkpoints on a CPU: a copy is written, by a process that knows it has no GPU."""

from __future__ import annotations

from typing import Any

from megatron_dynbatch.cpu.swap import swap


def install_async_checkpoints() -> None:
    """Let Megatron's writer process (`--async-save --async-strategy mcore`) run without a GPU."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    swap(PersistentAsyncCaller, "async_loop", staticmethod(_loop_on_cpu))
    swap(FileSystemWriterAsync, "preload_tensors", staticmethod(_copied))


def _copied(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """What Megatron's function returns, each tensor copied.

    Moving a tensor from a GPU copies it; one that is on the CPU already would stay the weights
    themselves, which the next step changes while they are written.
    """
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in write_buckets
    ]


def _loop_on_cpu(*args: Any) -> None:
    """Megatron's own loop, in a process that has stood in for the GPU first."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    # A fresh process: the class still has Megatron's loop, and enabling would replace it.
    loop = PersistentAsyncCaller.async_loop
    from megatron_dynbatch.cpu import enable

    enable()
    loop(*args)

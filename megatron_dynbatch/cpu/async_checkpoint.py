"""Asynchronous checkpoints on a CPU: the process that writes them must know it has no GPU."""

from __future__ import annotations

from typing import Any

from megatron_dynbatch.cpu.swap import swap


def install_async_checkpoints() -> None:
    """Let Megatron's writer process (`--async-save --async-strategy mcore`) run without a GPU."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    swap(PersistentAsyncCaller, "async_loop", staticmethod(_loop_on_cpu))


def _loop_on_cpu(*args: Any) -> None:
    """Megatron's own loop, in a process that has stood in for the GPU first."""
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    # A fresh process: the class still has Megatron's loop, and enabling would replace it.
    loop = PersistentAsyncCaller.async_loop
    from megatron_dynbatch.cpu import enable

    enable()
    loop(*args)

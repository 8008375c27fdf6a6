"""The real Megatron on a CPU: dry-run a pretrain script on a laptop, in CI, in tests.

`enable()` stands in for the parts of torch.cuda, of Transformer Engine and of NCCL that
`megatron.training.pretrain` asks for; Megatron's own code runs over gloo, but for what docs/cpu.md
lists. Call it before the script (or anything else) imports Megatron. It cannot be undone within the
process.
"""

from __future__ import annotations

import os
import socket

import megatron_dynbatch._torch  # noqa: F401
from megatron_dynbatch.cpu.reset import reset_megatron

__all__ = ["enable", "reset_megatron"]

_enabled = False


def enable() -> None:
    """Make this process run Megatron on the CPU. Calling it again changes nothing.

    Raises:
        ValueError: This version of torch or Megatron has nothing where a stand-in belongs, or
            Megatron's training package is not installed.
    """
    global _enabled
    if _enabled:
        return
    _set_environment()

    from megatron_dynbatch.cpu.collectives import install_collectives
    from megatron_dynbatch.cpu.cuda_surface import install_cuda_surface
    from megatron_dynbatch.cpu.devices import install_devices

    install_cuda_surface()
    install_devices()
    install_collectives()
    try:
        import megatron.training  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--cpu needs Megatron's training package, and {error.name!r} is missing: "
            "pip install 'megatron-dynbatch[megatron]'"
        ) from error

    from megatron_dynbatch.cpu.megatron_patches import install_megatron_patches

    install_megatron_patches()
    _enabled = True


def _set_environment() -> None:
    """Default what Megatron reads from the environment; what is set stays."""
    # Nothing is compiled, and Megatron insists on the second for TP and CP.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    # Started without torchrun: a world of one process.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))

"""Whoever asks for a CUDA tensor gets a CPU tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_dynbatch.cpu.swap import swap


class DeviceMode(TorchFunctionMode):
    """Map CUDA devices to the CPU in every torch function called on this thread.

    torch keeps function modes per thread: a thread that creates tensors on "cuda" enters one of its
    own (`with DeviceMode(): …`).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if kwargs.get("device") is not None:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _to_cpu(args[1]), *args[2:])
        elif func is torch.Tensor.type:
            return _type(func, args, kwargs)
        return func(*args, **kwargs)


def install_device_mode() -> None:
    """Enter a DeviceMode for good, inside backward passes too, and neutralise `.cuda()`."""
    DeviceMode().__enter__()
    _keep_mode_in_backward()
    swap(torch.Tensor, "cuda", _same_tensor)
    swap(torch.Tensor, "pin_memory", _same_tensor)
    swap(torch.Tensor, "is_pinned", lambda self, device=None: False)
    swap(torch.nn.Module, "cuda", lambda self, device=None: self)


def _to_cpu(device: Any) -> Any:
    """Map "cuda…", torch.device("cuda", n) and bare device numbers to the CPU; leave the rest."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return "cpu"
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return "cpu" if device.type == "cuda" else device
    return device


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call CPU tensor types by their CUDA names: DistributedOptimizer compares these strings."""
    if len(args) == 1 and not kwargs:
        return func(*args).replace("torch.", "torch.cuda.", 1)
    if len(args) > 1 and isinstance(args[1], str):
        args = (args[0], args[1].replace("torch.cuda.", "torch.", 1), *args[2:])
    return func(*args, **kwargs)


def _same_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


def _keep_mode_in_backward() -> None:
    """Enter the mode again where the autograd engine starts.

    torch switches a mode off while it handles a call, `Tensor.backward` included, so activation
    recomputation and gradient hooks would run without it.
    """
    run = torch.autograd._engine_run_backward

    def run_in_mode(*args: Any, **kwargs: Any) -> Any:
        with DeviceMode():
            return run(*args, **kwargs)

    swap(torch.autograd, "_engine_run_backward", run_in_mode)

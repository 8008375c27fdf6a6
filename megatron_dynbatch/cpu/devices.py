"""Whoever asks for a CUDA tensor gets a CPU tensor.

The functions that make tensors are replaced one by one. A torch function mode would catch them all
in ten lines, but it also catches every other call and every attribute of a tensor: that is a tenth
of a small training's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dynbatch.cpu.swap import swap

_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def install_devices() -> None:
    """Map CUDA devices to the CPU wherever a tensor is made or moved."""
    for name in _FACTORIES:
        swap(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        swap(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    swap(torch.Tensor, "to", _moving(torch.Tensor.to))
    swap(torch.Tensor, "type", _typing(torch.Tensor.type))
    swap(torch.Tensor, "cuda", _same_tensor)
    swap(torch.Tensor, "pin_memory", _same_tensor)
    swap(torch.Tensor, "is_pinned", lambda self, device=None: False)
    swap(torch.nn.Module, "cuda", lambda self, device=None: self)


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return made


def _moving(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if args:
            args = (_to_cpu(args[0]), *args[1:])
        return to(self, *args, **kwargs)

    return moved


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


def _typing(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """CPU tensor types under their CUDA names: DistributedOptimizer compares these strings."""

    @functools.wraps(type_of)
    def typed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:
            return type_of(self).replace("torch.", "torch.cuda.", 1)
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch.", 1), *args[1:])
        return type_of(self, *args, **kwargs)

    return typed


def _same_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self

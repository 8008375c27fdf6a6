"""torch.cuda, answered by the CPU.

Megatron asks torch.cuda for a device, streams, generators and memory figures at start-up and in
its loop. Every one of these questions gets an answer that is true for one CPU device, so that
Megatron's own code runs unchanged. Random state: the CPU generator is *the* generator, therefore
Megatron's tracker of model-parallel random states keeps its meaning.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_dynbatch.cpu.inert import Event, NullContext, Stream, always, nothing
from megatron_dynbatch.cpu.swap import swap

_STREAM = Stream()
_TENSOR_TYPES = (
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "ShortTensor",
)


def install_cuda_surface() -> None:
    """Replace the public surface of torch.cuda (and torch.accelerator) that Megatron touches."""
    _devices()
    _streams()
    _random_state()
    _memory()
    _typed_tensors()
    _accelerator()


def _replace_all(owner: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        swap(owner, name, value)


def _call_now(callback: Callable[[], Any], **kwargs: Any) -> None:
    """Run what torch would queue until CUDA starts: it never starts here."""
    callback()


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    # Compute capability 8.0: old enough to switch on no feature of newer GPUs.
    return SimpleNamespace(
        name="CPU", major=8, minor=0, total_memory=1 << 40, multi_processor_count=1, warp_size=32
    )


def _devices() -> None:
    """One device, number 0, always current.

    `current_device` stays an int: Megatron formats it into "cuda:{…}" as well as passing it as a
    device, and `devices` understands both.
    """
    _replace_all(
        torch.cuda,
        {
            "is_available": always(True),
            "is_initialized": always(True),
            "init": nothing(),
            "_lazy_init": nothing(),
            "_lazy_call": _call_now,
            "device_count": always(1),
            "current_device": always(0),
            "set_device": nothing(),
            "device": NullContext,
            "synchronize": nothing(),
            "ipc_collect": nothing(),
            "get_device_properties": _get_device_properties,
            "get_device_capability": always((8, 0)),
            "get_device_name": always("CPU"),
            "is_bf16_supported": always(True),
        },
    )


def _streams() -> None:
    """Streams and events that are always done."""
    _replace_all(
        torch.cuda,
        {
            "Stream": Stream,
            "ExternalStream": Stream,
            "Event": Event,
            "stream": NullContext,
            "set_stream": nothing(),
            "current_stream": always(_STREAM),
            "default_stream": always(_STREAM),
            "is_current_stream_capturing": always(False),
        },
    )
    _replace_all(
        torch.cuda.nvtx, {"range_push": nothing(), "range_pop": nothing(), "range": NullContext}
    )


def _random_state() -> None:
    """Make the CPU generator the generator of device 0."""
    values: dict[str, Any] = {
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "set_rng_state_all": lambda new_states: torch.set_rng_state(new_states[0]),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(int(seed)),
        "initial_seed": lambda: torch.default_generator.initial_seed(),
    }
    _replace_all(torch.cuda, values)
    _replace_all(torch.cuda.random, values)
    swap(torch.cuda, "default_generators", (torch.default_generator,))


def _memory() -> None:
    """No CUDA memory is in use."""

    values: dict[str, Any] = {
        "empty_cache": nothing(),
        "memory_allocated": always(0),
        "max_memory_allocated": always(0),
        "memory_reserved": always(0),
        "max_memory_reserved": always(0),
        "reset_peak_memory_stats": nothing(),
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "memory_snapshot": lambda *args, **kwargs: [],
        "mem_get_info": always((1 << 40, 1 << 40)),
    }
    _replace_all(torch.cuda, values)
    _replace_all(torch.cuda.memory, values)
    # Newer than the oldest torch we support, and only logged.
    if hasattr(torch.cuda, "device_memory_used"):
        swap(torch.cuda, "device_memory_used", always(0))


def _typed_tensors() -> None:
    """torch.cuda.FloatTensor and its kin build CPU tensors."""
    for name in _TENSOR_TYPES:
        swap(torch.cuda, name, getattr(torch, name))


def _accelerator() -> None:
    """No accelerator: torch itself (process groups, loaders, optimizers) takes its CPU paths.

    `torch.cuda.is_available` answers True for Megatron, therefore torch must not be asked twice.
    """
    _replace_all(
        torch.accelerator,
        {
            "is_available": always(False),
            "current_accelerator": always(None),
        },
    )
    # Named current_device_idx in torch 2.6.
    if hasattr(torch.accelerator, "current_device_index"):
        swap(torch.accelerator, "current_device_index", always(0))
    # Asks the accelerator for its stream on every optimizer step; absent before torch 2.9.
    check = "_accelerator_graph_capture_health_check"
    if hasattr(torch.optim.Optimizer, check):
        swap(torch.optim.Optimizer, check, nothing())
    legacy_check = "_cuda_graph_capture_health_check"
    if hasattr(torch.optim.Optimizer, legacy_check):
        swap(torch.optim.Optimizer, legacy_check, nothing())

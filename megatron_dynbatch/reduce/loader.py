"""Loads the kernels on a GPU and launches them on torch's current stream.

A cubin shipped with the package is taken if it was made from this source for this GPU, else one
from the disk cache, else NVRTC compiles it (in seconds, once) and the cache keeps it. Nothing here
is needed without a GPU.
"""

import ctypes
import os
import struct
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.reduce import build

BLOCK = 256  # threads of a block: kBlock of csrc/common.cuh

Argument = Tensor | int | float | None


def cache_folder() -> Path:
    """Where compiled kernels are kept: $MEGATRON_DYNBATCH_CACHE or ~/.cache/megatron_dynbatch."""
    chosen = os.environ.get("MEGATRON_DYNBATCH_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "megatron_dynbatch"


class KernelError(DynbatchError, RuntimeError):
    """A call of the CUDA driver failed."""


def _check(result: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"CUDA driver: {result[0].name}")
    return result[1] if len(result) == 2 else None


@dataclass
class Kernel:
    """One entry point: packs arguments into a buffer of its own and launches."""

    function: Any
    name: str
    _packers: dict[tuple[type, ...], "_Packer"] = field(default_factory=dict)

    def launch(self, grid: tuple[int, int], arguments: Sequence[Argument], stream: int) -> None:
        """Launches with blocks of `BLOCK` threads.

        Args:
            grid: Blocks in x and y.
            arguments: Tensors (their address; None: a null pointer), ints (int32) and floats
                (float64), in the order of the kernel's parameters.
            stream: Handle of the CUDA stream.
        """
        from cuda.bindings import driver

        values = [
            a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments
        ]
        kinds = tuple(_code(a) for a in arguments)
        if kinds not in self._packers:
            self._packers[kinds] = _Packer.of(kinds)
        packer = self._packers[kinds]
        packer.pack(values)
        (error,) = driver.cuLaunchKernel(
            self.function, *grid, 1, BLOCK, 1, 1, 0, stream, packer.pointers_address, 0
        )
        if error != driver.CUresult.CUDA_SUCCESS:
            where = f"at launch of {self.name} on {grid} blocks"
            raise KernelError(f"CUDA driver: {error.name} {where}")


_thread = threading.local()


def make_context_current(device_index: int) -> None:
    """Makes sure that this thread can launch: call it with that device selected.

    A thread of autograd's that runs the backward pass on the first device has no context until it
    calls the runtime, and the driver then refuses a launch.
    """
    if getattr(_thread, "has_context", False):
        return
    from cuda.bindings import driver

    if not int(_check(driver.cuCtxGetCurrent())):
        device = _check(driver.cuDeviceGet(device_index))
        # Torch retains it for the whole process, so this second hold is never released.
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(device))))
    _thread.has_context = True


def _code(argument: Argument) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return "P"
    return "d" if isinstance(argument, float) else "i"


@dataclass
class _Packer:
    """A buffer that holds one kernel's arguments, and the array of their addresses."""

    layout: struct.Struct
    buffer: Any
    pointers: Any
    pointers_address: int

    @classmethod
    def of(cls, kinds: tuple[Any, ...]) -> "_Packer":
        # Native alignment; a prefix's size is where the next value would be placed unaligned, so
        # offsets are taken from the size including the value.
        offsets = [
            struct.calcsize("@" + "".join(kinds[: i + 1])) - struct.calcsize("@" + kind)
            for i, kind in enumerate(kinds)
        ]
        layout = struct.Struct("@" + "".join(kinds))
        buffer = ctypes.create_string_buffer(layout.size)
        base = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(kinds))(*[base + offset for offset in offsets])
        return cls(layout, buffer, pointers, ctypes.addressof(pointers))

    def pack(self, values: Sequence[int | float]) -> None:
        # The driver copies the arguments during the launch, so one buffer serves every launch.
        self.layout.pack_into(self.buffer, 0, *values)


@dataclass
class Module:
    """The kernels loaded on one device."""

    handle: Any
    origin: str
    _kernels: dict[str, Kernel] = field(default_factory=dict)

    def kernel(self, name: str) -> Kernel:
        """An entry point by name."""
        from cuda.bindings import driver

        if name not in self._kernels:
            function = _check(driver.cuModuleGetFunction(self.handle, name.encode()))
            self._kernels[name] = Kernel(function, name)
        return self._kernels[name]


@cache
def load(device_index: int) -> Module:
    """Loads the kernels on a CUDA device.

    Raises:
        KernelError, RuntimeError, ImportError: They cannot be compiled or loaded there.
    """
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device_index)
    architecture = 10 * major + minor
    # Torch makes the device's primary context current when it allocates.
    torch.empty(1, device=torch.device("cuda", device_index))
    with torch.cuda.device(device_index):
        shipped = _matching(build.CUBINS, architecture)
        if shipped is not None:
            error, handle = driver.cuModuleLoadData(shipped.read_bytes())
            if error == driver.CUresult.CUDA_SUCCESS:
                return Module(handle, f"cubin {shipped.name}")
            warnings.warn(
                f"the shipped cubin {shipped.name} does not load ({error.name}); compiling with "
                "NVRTC instead",
                stacklevel=2,
            )
        cubin, origin = _compiled(architecture)
        return Module(_check(driver.cuModuleLoadData(cubin)), origin)


def _matching(folder: Path, architecture: int) -> Path | None:
    """A cubin of this source that runs on the architecture: same major version, minor not above."""
    for candidate in range(architecture, architecture - architecture % 10 - 1, -1):
        path = folder / build.cubin_name(candidate)
        if path.exists():
            return path
    return None


def _compiled(architecture: int) -> tuple[bytes, str]:
    from cuda.bindings import driver

    version = build.nvrtc_version()
    driver_version = _check(driver.cuDriverGetVersion())
    name = f"nvrtc{version}-driver{driver_version}-{build.cubin_name(architecture)}"
    path = cache_folder() / name
    if path.exists():
        return path.read_bytes(), f"NVRTC {version} for sm_{architecture}, cached in {path}"
    cubin = build.compile_with_nvrtc(architecture)
    try:
        build.write_atomically(path, cubin)
    except OSError as error:
        warnings.warn(f"compiled kernels cannot be kept in {path.parent}: {error}", stacklevel=2)
    return cubin, f"NVRTC {version} for sm_{architecture}"

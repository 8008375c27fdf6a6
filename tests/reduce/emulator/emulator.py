"""Runs the CUDA kernels on the host: the same source, compiled by g++, in place of a GPU launch.

`Emulator` replaces `kernels.launch`; tensors on the CPU are then what a GPU would see. With a
sanitizer each launch is a program of its own, so that its report can be read.
"""

import ctypes
import os
import re
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_dynbatch.reduce import build

HERE = Path(__file__).parent
BLOCK = 64  # two warps are enough for every barrier to matter
DEADLOCK, UNKNOWN_KERNEL = 1, 2


def kernel_names(source: str) -> list[str]:
    """Names of all entry points: the first argument of each of their macros."""
    return re.findall(r"^[A-Z_]+\((\w+),", source, re.MULTILINE)


class SanitizerError(AssertionError):
    """A sanitizer reported; its report is the message."""


class Emulator:
    """Compiled kernels and the way to launch them.

    Args:
        folder: Where to build.
        sanitizer: None for fibres, "thread" or "address".
        only: Regular expression of the entry points to compile.
        fault: (file, text, replacement): a fault to plant; the text must be there once.
        as_driver: Build a stand-in for libcuda.so.1 in the folder; it is not loaded here.
    """

    def __init__(
        self,
        folder: Path,
        sanitizer: str | None = None,
        only: str = "",
        fault: tuple[str, str, str] | None = None,
        as_driver: bool = False,
    ) -> None:
        self.folder, self.sanitizer = folder, sanitizer
        self.launches: list[str] = []
        self.seed, self.order = 0, 0
        folder.mkdir(parents=True, exist_ok=True)
        files = build.source_files()
        if fault:
            name, text, replacement = fault
            assert files[name].count(text) == 1, f"{text!r} is not there once in {name}"
            files[name] = files[name].replace(text, replacement)
        lines = files[build.ENTRY].splitlines()
        chosen = [ln for ln in lines if not kernel_names(ln) or re.search(only, ln)]
        files[build.ENTRY] = "\n".join(chosen)
        for name, text in files.items():
            (folder / name).write_text(text)
        entry = folder / build.ENTRY
        tries = " ".join(f"TRY({name})" for name in kernel_names(files[build.ENTRY]))
        command = ["g++", "-std=c++17", "-O1", "-pthread", "-ffp-contract=off"]
        command += ["-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE", "-include", str(HERE / "host.h")]
        command += [f"-DDYNBATCH_BLOCK={BLOCK}", f'-DEMULATED_SOURCE="{entry}"']
        command += [f"-DEMULATED_KERNELS={tries}", f"-I{HERE}", str(HERE / "main.cpp")]
        self.binary = folder / ("libcuda.so.1" if as_driver else "kernels")
        if sanitizer:
            command += ["-DEMULATE_WITH_THREADS", "-DEMULATE_AS_PROGRAM", "-g"]
            command += [f"-fsanitize={sanitizer}"]
        else:
            command += ["-shared", "-fPIC"]
        if as_driver:
            command += [str(HERE / "driver.cpp"), "-ldl"]
        subprocess.run([*command, "-o", str(self.binary)], check=True)
        self.library = None if sanitizer or as_driver else ctypes.CDLL(str(self.binary))

    def launch(self, name: str, grid: tuple[int, int], arguments: Sequence) -> None:
        """Takes the place of `kernels.launch`."""
        self.launches.append(name)
        for argument in arguments:
            assert not isinstance(argument, Tensor) or argument.is_contiguous()
        if self.library is None:
            self._run_program(name, grid, arguments)
            return
        values = [_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        status = self.library.emulate(name.encode(), *grid, addresses, self.seed, self.order)
        assert status != UNKNOWN_KERNEL, f"no kernel named {name}"
        assert status != DEADLOCK, f"{name}: some threads wait at a barrier that others never reach"

    def take_traffic(self) -> tuple[int, int, int]:
        """Bytes read, bytes written and misaligned accesses since the last call.

        Counted at pointers that the source declares with GLOBAL, by fibres alone.
        """
        assert self.library is not None
        counts = (ctypes.c_longlong * 3)()
        self.library.take_traffic(counts)
        return counts[0], counts[1], counts[2]

    def _run_program(self, name: str, grid: tuple[int, int], arguments: Sequence) -> None:
        request = struct.pack("q", len(name)) + name.encode()
        request += struct.pack("qqq", *grid, len(arguments))
        for argument in arguments:
            is_buffer = isinstance(argument, Tensor)
            content = _bytes(argument) if is_buffer else bytes(_value(argument))
            request += struct.pack("qq", is_buffer, len(content)) + content
        paths = [self.folder / "request", self.folder / "answer"]
        paths[0].write_bytes(request)
        result = subprocess.run(
            [str(self.binary), *map(str, paths)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        )
        if "Sanitizer" in result.stderr:
            raise SanitizerError(result.stderr)
        assert result.returncode == 0, f"{name}: exit {result.returncode}\n{result.stderr}"
        answer, at = paths[1].read_bytes(), 0
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.numel():
                size = argument.numel() * argument.element_size()
                flat = torch.frombuffer(bytearray(answer[at : at + size]), dtype=torch.uint8)
                argument.view(-1).view(torch.uint8).copy_(flat)
                at += size


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def _value(argument: Tensor | int | float | None) -> ctypes._SimpleCData:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_int(argument)

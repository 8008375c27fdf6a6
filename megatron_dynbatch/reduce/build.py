"""Compiles the kernels' CUDA source to cubins, with nvcc or with NVRTC; no GPU is needed.

Uses the standard library alone (and `cuda.bindings`, if it is there), so that an installer can load
this file by its path, without importing the package or torch.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("csrc")
ENTRY = "kernels.cu"
ARCHITECTURES = (80, 90, 100, 120)
CUBINS = Path(__file__).with_name("cubins")


def source_files() -> dict[str, str]:
    """File name → text of every kernel source."""
    return {p.name: p.read_text() for p in sorted(SOURCE.iterdir()) if p.suffix in (".cu", ".cuh")}


def source_hash() -> str:
    """Hash of all kernel sources, in the name of every cubin made from them."""
    return hashlib.sha256(repr(source_files()).encode()).hexdigest()[:16]


def cubin_name(architecture: int) -> str:
    """File name of a cubin for compute capability `architecture` (90 for 9.0)."""
    return f"kernels-{source_hash()}-sm_{architecture}.cubin"


def compile_with_nvcc(architecture: int, nvcc: str = "nvcc") -> bytes:
    """Compiles with the toolkit's compiler.

    Raises:
        RuntimeError: With the compiler's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "kernels.cubin"
        command = [nvcc, "-cubin", f"-arch=sm_{architecture}", "-std=c++17", "-o", str(out)]
        result = subprocess.run(
            [*command, str(SOURCE / ENTRY)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(f"nvcc for sm_{architecture} failed:\n{result.stderr}")
        return out.read_bytes()


def compile_with_nvrtc(architecture: int) -> bytes:
    """Compiles with NVRTC, the library that every CUDA build of torch brings.

    Raises:
        RuntimeError: With the compiler's output.
        ImportError: `cuda.bindings` is not installed.
    """
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {result[0].name}")
        return result[1] if len(result) == 2 else None

    files = source_files()
    headers = [name for name in files if name != ENTRY]
    program = check(
        nvrtc.nvrtcCreateProgram(
            files[ENTRY].encode(),
            ENTRY.encode(),
            len(headers),
            [files[name].encode() for name in headers],
            [name.encode() for name in headers],
        )
    )
    options = [f"--gpu-architecture=sm_{architecture}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"NVRTC for sm_{architecture} failed:\n{log.decode()}")
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def nvrtc_version() -> str:
    """Version of the NVRTC that would compile, such as "13.0"."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that others see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def build_cubins(target: Path = CUBINS) -> list[Path]:
    """Compiles for all architectures into a folder, as an installer does.

    Returns:
        The files written; none where there is neither nvcc nor NVRTC (kernels are then compiled
        at first use, if at all).
    """
    compiler = compile_with_nvcc if shutil.which("nvcc") else compile_with_nvrtc
    written = []
    for architecture in ARCHITECTURES:
        try:
            cubin = compiler(architecture)
        except ImportError:
            return []
        except RuntimeError as error:
            # An older compiler lacks the newest architectures; those compile at first use.
            print(f"skipping kernels for sm_{architecture}: {error}")
            continue
        path = target / cubin_name(architecture)
        write_atomically(path, cubin)
        written.append(path)
    return written

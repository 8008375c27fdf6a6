"""The kernels compile for every architecture, within their budget of registers and memory."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron_dynbatch.reduce import build, loader
from tests.reduce.emulator.emulator import kernel_names

# 65536 registers / 256 threads / 4 blocks: enough blocks in flight to hide memory latency.
MAX_REGISTERS = 64


@pytest.fixture(scope="module", params=build.ARCHITECTURES)
def cubin(request, tmp_path_factory):
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        content = build.compile_with_nvrtc(request.param)
    except RuntimeError as error:
        if "invalid value for --gpu-architecture" in str(error):
            pytest.skip(f"NVRTC {build.nvrtc_version()} does not know sm_{request.param}")
        raise
    path = tmp_path_factory.mktemp("cubins") / build.cubin_name(request.param)
    build.write_atomically(path, content)
    return path


def from_toolkit(tool: str, *arguments: str | Path) -> str:
    """What a tool of the CUDA toolkit prints, taken from where triton brings it."""
    triton = pytest.importorskip("triton")
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    if not path.exists():
        pytest.skip(f"triton brings no {tool} here")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_resources(cubin):
    report = from_toolkit("cuobjdump", "--dump-resource-usage", cubin)
    used = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", report)
    names = kernel_names(build.source_files()[build.ENTRY])
    assert sorted(name for name, *_ in used) == sorted(names)
    for name, registers, stack, shared, local in used:
        assert int(registers) <= MAX_REGISTERS, name
        assert int(stack) == int(local) == 0, f"{name} spills"
        assert int(shared) <= 4096, name


def test_streams_move_128_bits_at_a_time(cubin):
    functions = re.split(r"\.text\.(\w+):", from_toolkit("nvdisasm", cubin))
    code = dict(zip(functions[1::2], functions[2::2], strict=True))
    for name, text in code.items():
        if name.startswith(("segment_sums", "logprob_statistics", "logprob_backward")):
            assert "LDG.E.128" in text, name
        if re.match("segment_sums_backward_float|token_weights|logprob_backward", name):
            assert "STG.E.128" in text, name


def test_a_cubin_serves_its_own_major_version_only(tmp_path):
    for architecture in (80, 90):
        (tmp_path / build.cubin_name(architecture)).touch()
    found = {a: loader._matching(tmp_path, a) for a in (75, 80, 86, 89, 90, 100)}
    assert [a for a, path in found.items() if path is not None] == [80, 86, 89, 90]
    assert found[89] == tmp_path / build.cubin_name(80)


def test_argument_buffers_match_the_layout_of_c():
    # A pointer, an int, a double (aligned to 8), an int, a pointer (aligned to 8).
    packer = loader._Packer.of(("P", "i", "d", "i", "P"))
    base = packer.pointers[0]
    assert [p - base for p in packer.pointers] == [0, 8, 16, 24, 32]
    packer.pack([1, 2, 3.0, 4, 5])
    assert packer.buffer.raw[8:12] == (2).to_bytes(4, "little")
    assert packer.buffer.raw[32:40] == (5).to_bytes(8, "little")


def test_the_hash_follows_the_source(monkeypatch):
    before = build.source_hash()
    files = build.source_files()
    monkeypatch.setattr(build, "source_files", lambda: {**files, "new.cuh": ""})
    assert build.source_hash() != before

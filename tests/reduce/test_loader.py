"""Loading and launching through the driver's own interface, on a stand-in for libcuda.

`cuda.bindings` calls a library that runs kernels in the emulator, so that argument buffers, grids
and names are those that a real driver would be given.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dynbatch.reduce import build, kernels, loader
from tests.reduce.emulator import emulator as emulation

PROGRAM = """
import threading
import torch
from cuda.bindings import driver
from megatron_dynbatch.reduce import kernels, loader
from tests.reduce.emulator.emulator import BLOCK
from tests.reduce.test_kernels_on_host import assert_equal, random_batch, run_everything
from tests.reduce.test_policy_loss import inputs
from megatron_dynbatch.reduce import PolicyFormula, ops

loader.BLOCK, kernels.TILE = BLOCK, 4 * BLOCK
module = loader.Module(loader._check(driver.cuModuleLoadData(b"cubin")), "stand-in")
kernels.launch = lambda name, grid, arguments: module.kernel(name).launch(grid, arguments, 0)
refused = []
def launch_from_a_thread(prepare):
    if prepare:
        loader.make_context_current(0)
    try:
        kernels.weighted_sums(torch.ones(1, 4), torch.ones(4, dtype=torch.float64))
    except loader.KernelError as error:
        refused.append(str(error))
for prepare in (False, True):
    thread = threading.Thread(target=launch_from_a_thread, args=[prepare])
    thread.start()
    thread.join()
message = "CUDA driver: CUDA_ERROR_INVALID_CONTEXT at launch of "
message += "segment_sums_float32_1 on (1, 1) blocks"
assert refused == [message], refused
loader.make_context_current(0)
assert_equal(run_everything(*random_batch(5, 2, 1, 3)))
x, w = inputs(torch.float32)
arguments = (x["logp"], x["old"], x["advantages"], w, x["ref"], None, x["entropy"])
arguments += (*PolicyFormula(kl="k3", kl_coef=0.1).scalars(), None, None, 0)
for got, right in zip(kernels.policy_loss(*arguments), ops._TORCH["policy_loss"](*arguments)):
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)
try:
    module.kernel("missing")
except loader.KernelError as error:
    print(error)
"""


def test_launches_through_the_driver(tmp_path):
    pytest.importorskip("cuda.bindings.driver")
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    if torch.cuda.is_available():
        pytest.skip("the real driver is in use")
    names = r"sums\w*_float32(_[18])?,|token_weights_uint8|policy"
    emulation.Emulator(tmp_path, only=names, as_driver=True)
    root = Path(__file__).parents[2]
    path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "CUDA driver: CUDA_ERROR_NOT_FOUND"


def test_status_says_why():
    status = kernels.status(torch.device("cpu"))
    assert not status.active and status.reason == "torch implementation: no kernels for cpu tensors"
    if not torch.cuda.is_available():
        assert not kernels.status(torch.device("cuda", 0)).active
        assert kernels.status(torch.device("cuda", 0)).reason.startswith("torch implementation: ")


def test_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("MEGATRON_DYNBATCH_KERNELS", "0")
    kernels.status.cache_clear()
    status = kernels.status(torch.device("cuda", 0))
    kernels.status.cache_clear()
    assert status.reason == "torch implementation: MEGATRON_DYNBATCH_KERNELS=0"


def test_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGATRON_DYNBATCH_CACHE", str(tmp_path))
    assert loader.cache_folder() == tmp_path


def test_cubins_are_written_whole_and_named_after_their_source(monkeypatch, tmp_path):
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "compile_with_nvrtc", lambda architecture: b"%d" % architecture)
    written = build.build_cubins(tmp_path)
    assert [p.read_bytes() for p in written] == [b"80", b"90", b"100", b"120"]
    assert written[0].name == f"kernels-{build.source_hash()}-sm_80.cubin"
    assert sorted(tmp_path.iterdir()) == sorted(written)


@pytest.mark.parametrize(
    ("error", "written"), [(ImportError("no compiler"), 0), (RuntimeError("too old"), 3)]
)
def test_a_missing_compiler_is_no_error(monkeypatch, tmp_path, error, written):
    def compile_or_fail(architecture):
        if isinstance(error, ImportError) or architecture == 120:
            raise error
        return b""

    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    monkeypatch.setattr(build, "compile_with_nvrtc", compile_or_fail)
    assert len(build.build_cubins(tmp_path)) == written

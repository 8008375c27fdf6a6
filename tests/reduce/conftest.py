"""The kernels compiled for the host, once per session."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_dynbatch.reduce import kernels, loader
from tests.reduce.emulator import emulator as emulation

Start = Callable[[emulation.Emulator], emulation.Emulator]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> emulation.Emulator:
    """All kernels, run with fibres."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    return emulation.Emulator(tmp_path_factory.mktemp("fibres"))


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Puts an emulator in the place of the GPU; memory that nobody wrote reads as NaN."""

    def put(emulator: emulation.Emulator) -> emulation.Emulator:
        monkeypatch.setattr(kernels, "launch", emulator.launch)
        monkeypatch.setattr(kernels, "TILE", 4 * emulation.BLOCK)
        monkeypatch.setattr(loader, "BLOCK", emulation.BLOCK)
        emulator.launches.clear()
        emulator.seed = emulator.order = 0
        return emulator

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield put
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def emulator(compiled: emulation.Emulator, start: Start) -> emulation.Emulator:
    """Fibres, in the place of the GPU."""
    return start(compiled)

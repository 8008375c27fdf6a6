"""Each supported Megatron, hooked and as a patched copy, trains like the independent loop.

A version other than the environment's is looked for in .venv/megatron-core-VERSION; `make
test-versions` puts it there.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.cli.main import main as command
from megatron_dynbatch.cli.sites import installed_root
from megatron_dynbatch.versions import TESTED_PACKAGES
from tests.parity.rollouts import STEP_SIZES
from tests.pool import ROOT
from tests.versions.cells import CELLS, COMPARED

# The first test of a version runs all its cells.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def root_of(version: str) -> Path:
    """Folder that contains this version's ``megatron``; skips the test if there is none."""
    if version == installed_version("megatron-core"):
        root = installed_root()
        assert root is not None
        return root
    root = ROOT / ".venv" / f"megatron-core-{version}"
    if not root.is_dir():
        pytest.skip(f"megatron-core {version} is not in {root}: make test-versions installs it")
    return root


def run_cells(root: Path, *arguments: str) -> dict[str, Any]:
    """All cells in a process of its own, which meets no other Megatron."""
    path = [str(root), str(ROOT), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.versions", *arguments, *CELLS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert Path(answer["place"]) == root
    return answer


@functools.cache
def hooked(version: str) -> dict[str, Any]:
    """The cells under install()."""
    return run_cells(root_of(version))


@pytest.mark.parametrize("version", TESTED_PACKAGES)
def test_steps_and_resume_equal_the_independent_loop(version: str) -> None:
    answer = hooked(version)
    assert answer["version"].partition("+")[0] == version
    assert answer["changed"]
    for name in COMPARED:
        found = answer["cells"][name]["deviations"]
        assert found["metrics"] < 1e-5, name
        assert found["grad norm"] < 1e-5, name
        assert found["learning rate"] < 1e-12, name
        assert found["consumed"] == 0, name


@pytest.mark.parametrize("version", TESTED_PACKAGES)
def test_megatrons_own_number_of_iterations_is_no_bound(version: str) -> None:
    # 45 rollouts, at most 9 in a step: Megatron counts on 5 iterations.
    rows = hooked(version)["cells"]["beyond"]["rows"]
    assert [row["consumed"] for row in rows] == [8, 13, 22, 25, 28, 37, 45]


@pytest.mark.parametrize("version", TESTED_PACKAGES)
def test_a_skipped_step_is_consumed_and_not_trained(version: str) -> None:
    rows = hooked(version)["cells"]["skipped"]["rows"]
    sizes = dict(enumerate(STEP_SIZES, 1))
    assert [row["iteration"] for row in rows] == [1, 2, 4, 5, 6]
    assert rows[-1]["consumed"] == sum(sizes.values())
    trained = sum(size for number, size in sizes.items() if number != 3)
    assert rows[-1]["learning_rate"] == pytest.approx(2e-3 * (1 - trained / 45))


@pytest.mark.parametrize("version", TESTED_PACKAGES)
def test_a_patched_copy_does_the_same_to_the_last_bit(version: str, tmp_path: Path) -> None:
    shutil.copytree(root_of(version) / "megatron", tmp_path / "megatron")
    assert command(["patch", str(tmp_path), "--apply"]) == 0
    patched = run_cells(tmp_path, "--bare")
    assert not patched["changed"]
    assert patched["cells"] == hooked(version)["cells"]

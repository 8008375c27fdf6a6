"""Plans are the same with the oldest NumPy, in a newer Python, and under every hash seed.

The other NumPy and the other Python are looked for in .venv; `make plan-versions` puts them there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plan.golden import FINGERPRINTS
from tests.pool import ROOT

NUMPY = ROOT / ".venv" / "numpy-2.0.2"
PYTHON = ROOT / ".venv" / "plan-python" / "bin" / "python"


def fingerprints(python: str, *path: Path, hash_seed: str = "0") -> dict[str, str]:
    """Fingerprints of all golden plans, made in a process of its own."""
    places = os.pathsep.join(str(place) for place in (*path, ROOT))
    run = subprocess.run(
        [python, "-m", "tests.plan.golden"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": places, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    answer: dict[str, str] = json.loads(run.stdout)
    return answer


def test_another_hash_seed() -> None:
    assert fingerprints(sys.executable, hash_seed="4711") == FINGERPRINTS


@pytest.mark.skipif(not NUMPY.is_dir(), reason=f"no {NUMPY}: make plan-versions installs it")
def test_the_oldest_numpy() -> None:
    assert fingerprints(sys.executable, NUMPY) == FINGERPRINTS


@pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: make plan-versions installs it")
def test_a_newer_python() -> None:
    assert fingerprints(str(PYTHON)) == FINGERPRINTS

"""The oldest supported Megatron that brings its own training package, as a smoke at DP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.pool import ROOT

pytestmark = pytest.mark.slow

VERSION = "0.17.1"
# pip install --no-deps --target .venv/megatron-core-0.17.1 megatron-core==0.17.1
PLACE = ROOT / ".venv" / f"megatron-core-{VERSION}"


@pytest.mark.skipif(not PLACE.is_dir(), reason=f"megatron-core {VERSION} is not in {PLACE}")
def test_the_oldest_supported_version_equals_the_independent_loop() -> None:
    # A process of its own: the test jobs of this one have imported another Megatron.
    path = os.pathsep.join([str(PLACE), str(ROOT)])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.parity.smoke"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["version"] == VERSION
    assert found["metrics"] < 1e-5
    assert found["grad norm"] < 1e-5
    assert found["learning rate"] < 1e-12
    assert found["consumed"] == 0

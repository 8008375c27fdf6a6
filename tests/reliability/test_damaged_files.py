"""Damaged files never crash, and are never taken for whole; `make fuzz` reads more of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.pool import ROOT

FAST = 50
COUNT = 20_000 if os.environ.get("FUZZ") == "full" else 500


@pytest.mark.parametrize(
    ("first", "count"), [(0, FAST), pytest.param(FAST, COUNT - FAST, marks=pytest.mark.slow)]
)
def test_damaged_files_are_our_errors_or_read_right(first: int, count: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.reliability.damage", str(first), str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    tail = run.stderr[-2000:]
    assert run.returncode == 0, f"ended with {run.returncode} (negative: a signal):\n{tail}"
    met = json.loads(run.stdout)
    assert met["RolloutDataError"] > count / 2 and met["PlanError"] > count / 2
    assert met["read"] > 0

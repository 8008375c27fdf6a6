"""`make audit` fails where it audited nothing; pip-audit alone ends with 0 there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.package.audit import installed_pins, missing_extras, problems_of
from tests.pool import ROOT

CLEAN = {"dependencies": [{"name": "NumPy", "version": "2.0.0", "vulns": []}]}
SKIPPED = {"dependencies": [{"name": "numpy", "skip_reason": "Dependency not found on PyPI"}]}
WRONG = {
    "dependencies": [
        {"name": "numpy", "version": "2.0.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}
    ]
}
PINS = {"numpy": "2.0.0"}


def test_an_audited_set_without_vulnerabilities_is_no_problem() -> None:
    assert problems_of(CLEAN, PINS) == []


@pytest.mark.parametrize(
    ("report", "pins", "message"),
    [
        (CLEAN, {}, "nothing was audited: the set of requirements is empty"),
        (SKIPPED, PINS, "0 of 1 versions were audited"),
        ({"dependencies": []}, PINS, "did not answer for numpy 2.0.0"),
        (CLEAN, {**PINS, "torch": "2.6.0"}, "1 of 2 versions were audited"),
        (WRONG, PINS, "numpy 2.0.0: CVE-1, fixed in 2.1"),
    ],
)
def test_what_was_not_audited_is_a_problem(
    report: dict[str, object], pins: dict[str, str], message: str
) -> None:
    (problem,) = problems_of(report, pins)
    assert message in problem


@pytest.mark.parametrize(("text", "message"), [("", "is empty"), ("numpy==2.0.0", "0 of 1 versio")])
def test_the_command_fails_where_nothing_is_audited(
    tmp_path: Path, text: str, message: str
) -> None:
    """This Python has no pip-audit: as where its service does not answer."""
    (tmp_path / "requirements.txt").write_text(text)
    run = subprocess.run(
        [sys.executable, "-S", "-m", "tests.package.audit", sys.executable]
        + ["--requirements", str(tmp_path / "requirements.txt")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and message in run.stderr


def test_the_set_is_what_is_installed_and_the_extras() -> None:
    pins = installed_pins()
    assert {"numpy", "pyarrow", "torch"} <= set(pins) and "megatron-dynbatch" not in pins
    assert not any("+" in version for version in pins.values())
    names = [requirement.split("[")[0].split(">")[0] for requirement in missing_extras({})]
    assert {"transformer-engine", "cuda-bindings", "ray", "matplotlib", "rich"} <= set(names)

"""`examples`: whole scripts for whoever installed the package."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest

from megatron_dynbatch.cli.main import main
from tests.pool import ROOT


def test_the_examples_are_copied_whole_and_never_over_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["examples", str(tmp_path)]) == 0
    assert "grpo_sync.py" in capsys.readouterr().out
    wanted = {p.relative_to(ROOT) for p in (ROOT / "examples").rglob("*.py")}
    wanted |= {p.relative_to(ROOT) for p in (ROOT / "examples").glob("*.sh")}
    found = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()}
    assert wanted <= found and not any("__pycache__" in p.parts for p in found)
    assert all(filecmp.cmp(ROOT / name, tmp_path / name, shallow=False) for name in found)
    (tmp_path / "examples" / "own.py").write_text("mine")
    assert main(["examples", str(tmp_path)]) == 2
    assert f"{tmp_path}/examples is there already: give another DIR" in capsys.readouterr().err
    assert (tmp_path / "examples" / "own.py").read_text() == "mine"

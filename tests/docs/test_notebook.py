"""The notebook runs from top to bottom; its own assertions compare with values made by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pool import ROOT

NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    # The kernel finds the package; it keeps no history and no settings of anybody.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    stored = [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert stored == [], "commit the notebook without outputs"
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed = [
        "".join(output.get("text", "") for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    assert printed[0].startswith("12 rollouts, ")
    # Four ways to pack, and the mean by hand, print the same number.
    values = {line.split(":")[1].strip()[:8] for line in printed[2].splitlines()}
    assert len(values) == 1

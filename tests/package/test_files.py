"""What the index and a container builder get: the readme, the metadata, the Dockerfile."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.pool import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def readme(monkeypatch: pytest.MonkeyPatch) -> str:
    """The readme as setup.py hands it to the index."""
    given: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    return given["long_description"]


def test_every_link_of_the_readme_leads_somewhere_on_an_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = readme(monkeypatch)
    links = re.findall(r"\]\(([^)]+)\)", text)
    home = PROJECT["urls"]["Repository"]
    assert len(links) > 15 and all(re.match(r"https://|#", link) for link in links)
    version = runpy.run_path(str(ROOT / "megatron_dynbatch" / "_version.py"))["__version__"]
    assert f"{home}/raw/v{version}/docs/images/fixed-dynamic.png" in links
    assert f"{home}/blob/v{version}/docs/parity.md" in links


def test_the_index_renders_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    markdown = pytest.importorskip("readme_renderer.markdown")
    page = markdown.render(readme(monkeypatch))
    assert page is not None and page.count("<table>") >= 3 and page.count("<img") == 2
    assert "n:throughput" not in page  # marks of figures are not shown


def test_torch_is_needed_by_extras_only() -> None:
    names = {re.split(r"[<>=\[]", need)[0] for need in PROJECT["dependencies"]}
    assert names == {"numpy", "pyarrow"}
    extras = PROJECT["optional-dependencies"]
    assert all(any(n.startswith("torch>") for n in extras[x]) for x in ("torch", "megatron"))
    assert {"Repository", "Documentation", "Changelog", "Issues"} == set(PROJECT["urls"])


def test_the_dockerfile_is_sound_and_names_no_image() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^ARG BASE_IMAGE(.*)$", text, re.M) == [""]
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE_IMAGE}"}
    extras = re.findall(r"^ARG EXTRAS=(\w+)", text, re.M)
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

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


HOME = "https://example.org/somebody/project"


def readme(monkeypatch: pytest.MonkeyPatch, home: str | None) -> str:
    """The readme as setup.py hands it to the index."""
    given: dict[str, str] = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: given.update(options))
    script = runpy.run_path(str(ROOT / "setup.py"))
    assert given["long_description"] == script["readme"](script["repository"]())
    return str(script["readme"](home))


def test_every_link_of_the_readme_leads_somewhere_on_an_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = readme(monkeypatch, HOME)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 15 and all(re.match(r"https://|#", link) for link in links)
    version = runpy.run_path(str(ROOT / "megatron_dynbatch" / "_version.py"))["__version__"]
    assert f"{HOME}/raw/v{version}/docs/images/fixed-dynamic.png" in links
    assert f"{HOME}/blob/v{version}/docs/parity.md" in links
    # Without a home there is no link that leads nowhere; what was linked is still said.
    alone = readme(monkeypatch, None)
    assert all(re.match(r"https://|#", link) for link in re.findall(r"\]\(([^)]+)\)", alone))
    assert "a loop of your own" in alone and "![" not in alone


@pytest.mark.parametrize(("home", "pictures"), [(HOME, 2), (None, 0)])
def test_the_index_renders_the_readme(
    monkeypatch: pytest.MonkeyPatch, home: str | None, pictures: int
) -> None:
    markdown = pytest.importorskip("readme_renderer.markdown")
    page = markdown.render(readme(monkeypatch, home))
    assert page is not None and page.count("<table>") >= 3 and page.count("<img") == pictures
    assert "n:throughput" not in page  # marks of figures are not shown


def test_torch_is_needed_by_extras_only() -> None:
    names = {re.split(r"[<>=\[]", need)[0] for need in PROJECT["dependencies"]}
    assert names == {"numpy", "pyarrow"}
    extras = PROJECT["optional-dependencies"]
    assert all(any(n.startswith("torch>") for n in extras[x]) for x in ("torch", "megatron"))
    # An address stands there only if somebody answers at it; see the comment.
    assert all(url.startswith("https://") for url in PROJECT.get("urls", {}).values())


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

"""The tested versions of Megatron are the same wherever they are named."""

from __future__ import annotations

import re
import tomllib

from megatron_dynbatch.versions import TESTED, TESTED_PACKAGES
from tests.pool import ROOT


def test_the_page_of_versions_has_a_row_of_each() -> None:
    text = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d.]+) \((checkout|package)\) \|", text, re.M)
    assert dict(rows) == TESTED, "python -m tests.versions.table"


def test_make_and_the_environment_install_the_packages() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    others = re.search(r"^OTHER_MEGATRONS := .*megatron-core-,([\d. ]+)\)$", makefile, re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (need,) = (
        re.fullmatch(r"megatron-core>=([\d.]+),<([\d.]+)", line)
        for line in project["optional-dependencies"]["megatron"]
        if line.startswith("megatron-core")
    )
    assert others is not None and need is not None
    # The newest is the one that pip takes; the others lie beside it.
    assert tuple(others[1].split()) == TESTED_PACKAGES[:-1]
    first, before = (tuple(map(int, text.split("."))) for text in need.groups())
    versions = [tuple(map(int, text.split("."))) for text in TESTED_PACKAGES]
    assert first == versions[0] and versions[-1] < before

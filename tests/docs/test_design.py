"""docs/design.md names what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`([\w/]+\.py)` +`([\w.]+)`")


def named() -> list[tuple[str, str]]:
    """(file, name in it) of each place of the section on one step."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page[page.index("## One step, file by file") :]
    return NAMED.findall(" ".join(section.split()))


def defined(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Functions and classes of a file, and methods as `Class.method`."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found |= defined(node.body, f"{node.name}.")
    return found


def test_the_section_has_the_whole_way() -> None:
    assert len(named()) >= 18


@pytest.mark.parametrize(("file", "name"), named())
def test_each_name_is_where_the_page_says(file: str, name: str) -> None:
    tree = ast.parse((ROOT / "megatron_dynbatch" / file).read_text(encoding="utf-8"))
    assert name in defined(tree.body)

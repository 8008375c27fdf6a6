"""What `make lint` is told: the layers are those of docs/design.md, and no exception is stale."""

from __future__ import annotations

import re
import tomllib

from tests.pool import ROOT

TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


def test_the_layers_are_the_table_of_the_design() -> None:
    (contract,) = (c for c in TOOLS["importlinter"]["contracts"] if c["type"] == "layers")
    layers = [layer.split(" | ") for layer in reversed(contract["layers"])]
    height = {name: place for place, layer in enumerate(layers) for name in layer}
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.*?) \|", page[: page.index("\n## ")], re.MULTILINE)
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", cell) for cell in cells]
    # Without a row: the version number, what says how to get torch, and names loaded at first use.
    assert {name for row in rows for name in row} == height.keys() - {"_version", "_torch", "_lazy"}
    packages = [name for row in rows[1:] for name in row]  # the first: what every part may use
    assert packages == sorted(packages, key=height.__getitem__)


def test_every_unused_name_that_is_allowed_is_one() -> None:
    from vulture import Vulture

    finder = Vulture()
    finder.scavenge([str(ROOT / path) for path in TOOLS["vulture"]["paths"]])
    found = {item.name for item in finder.get_unused_code()}
    assert set(TOOLS["vulture"]["ignore_names"]) <= found

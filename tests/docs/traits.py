"""``python -m tests.docs.traits``: write the table of traits into docs/compatibility.md."""

from __future__ import annotations

import re

from megatron_dynbatch.hooks.traits import table_of_traits
from tests.pool import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
_PLACE = re.compile(r"(<!-- traits: [^\n]* -->\n).*?(<!-- end of traits -->)", re.DOTALL)


def with_table(text: str) -> str:
    """The page with the table as it is now."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{table_of_traits()}\n{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

"""docs/errors.md as data, and what tests of whole trainings say that they have seen of it."""

from __future__ import annotations

import re

from tests.pool import ROOT


def catalogue() -> list[tuple[list[str], str]]:
    """(classes of the section, message) of each line of the page."""
    lines, classes = [], list[str]()
    for line in (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            classes = re.findall(r"\b[A-Z]\w+", line.partition("(")[0])
        elif line.startswith("| ") and not line.startswith("| message"):
            lines.append((classes, line.split("|")[1].strip()))
    return lines


def pattern(message: str) -> re.Pattern[str]:
    """Matches a raised message of a line of the page; … stands for anything."""
    return re.compile(re.escape(message).replace("…", ".*"), re.DOTALL)


def shown(start: str, text: str) -> None:
    """Assert that the message of the page that begins like this stands in a text, as raised.

    `SHOWN_ELSEWHERE` of `bad_input` names the tests that call this.
    """
    (line,) = [line for _, line in catalogue() if line.startswith(start)]
    words = " ".join(text.split())  # lines of a message stand in one on the page
    assert pattern(line).search(words), f"not as on the page: {line}\n{text}"

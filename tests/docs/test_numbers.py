"""Figures of README and docs are those of the files of results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.readme_numbers import MARKED, differences, pages, with_figures

# A number with the unit of a measurement; bars and settings are told by the words around them.
MEASURED = re.compile(r"\d[\d.,]* ?(×|µs|us|ms|KiB|MiB|tokens/s)(?!\w)|\d[\d.]* to [\d.]+ ×")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert differences(text) == [], "make readme-numbers"
    # A line that begins with a comment would be taken as HTML, not as a paragraph.
    started = [line for line in text.splitlines() if re.match(r"<!--n:[\w-]+-->.", line)]
    assert started == []


def test_the_readme_has_no_measured_number_of_its_own() -> None:
    text = (pages()[0]).read_text(encoding="utf-8")
    assert len(MARKED.findall(text)) >= 8
    assert MEASURED.findall(MARKED.sub("", text)) == []


def test_another_number_is_noticed() -> None:
    text = (pages()[0]).read_text(encoding="utf-8")
    changed = re.sub(r"(<!--n:throughput-packed-->)[^<]*", r"\g<1>7.8 to 12.3", text)
    (line,) = differences(changed)
    assert line.startswith("throughput-packed: '7.8 to 12.3' should be '")
    assert with_figures(changed) == text
    with pytest.raises(ValueError, match="no figure is named 'speed'"):
        with_figures("<!--n:speed-->9<!--/n-->")

"""Colour on a terminal that wants it."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_CODES = {"bold": "1", "red": "31", "green": "32"}


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colour, and NO_COLOR (no-color.org) is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a style, as far as the stream shows colour.

    Args:
        text: What is printed.
        style: Words among bold, red, green.
        stream: Where to; default: standard output.
    """
    if not has_colour(stream or sys.stdout):
        return text
    return f"\033[{';'.join(_CODES[word] for word in style.split())}m{text}\033[0m"

"""Numbers and values in messages."""

from __future__ import annotations

from typing import Any


def counted(number: int, noun: str) -> str:
    """A number and what is counted, in the singular where it is one.

    "1 step", "1,024 steps", "2 micro-batches", "0 dummies".
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def short(value: Any) -> str:
    """`repr` of a value from outside, cut where it is long; there for every value."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int of more digits than Python prints, a deep list
        text = f"a {type(value).__name__}"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 200 else f"{text[:200]}…"

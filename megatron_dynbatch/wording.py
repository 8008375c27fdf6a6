"""Words around numbers in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and what is counted, in the singular where it is one.

    "1 step", "1,024 steps", "2 micro-batches", "0 dummies".
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"

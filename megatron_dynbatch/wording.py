"""Words around numbers in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number and what is counted, in the singular where it is one.

    "1 step", "1,024 steps", "2 micro-batches".
    """
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else ending}"

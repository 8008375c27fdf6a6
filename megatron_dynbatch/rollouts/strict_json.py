"""JSON from outside, read strictly: what could be understood in two ways is refused.

`json.loads` takes the last of two equal keys, makes infinity of 1e999, reads NaN, guesses UTF-16,
and lets half of a surrogate pair through, which no file can hold. Here each of them is a
`ValueError` that says so, and deep nesting is one too; the caller adds the file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any


def parse_json(text: str | bytes, *, allow_non_finite: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: The text; bytes are UTF-8.
        allow_non_finite: Whether NaN, Infinity and numbers beyond float64 are read as such.

    Raises:
        ValueError: It is no JSON, is nested too deeply, has a key twice in one object, a number
            that is not finite, or a string that is not Unicode.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    options: dict[str, Any] = {} if allow_non_finite else _FINITE
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, **options)
        if "\\u" in text:  # only an escape can make half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("a string has half of a surrogate pair") from error
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's keys and values (`object_pairs_hook`); ValueError if a key is there twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice[:80]!r} is there twice")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"number {text[:40]} is not finite")
    return number


_FINITE = {"parse_float": _finite, "parse_constant": _finite}

"""Structs in Thrift's compact protocol, in which Parquet keeps its footer and its page headers.

Needs no schema: a struct is a dict of field numbers. Takes memory only for what is there, however
many entries a list claims.
"""

from __future__ import annotations

from typing import Any

_MAX_DEPTH = 16  # Parquet's own structs are half as deep
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 7, 8, 9, 12
_VARINTS = (4, 5, 6)


def read_struct(content: bytes, at: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Field number → value (int, bool, bytes, list or struct) of a struct, and where it ends.

    Raises:
        ValueError: There is no whole struct.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("structs are nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while (head := _byte(content, at)) != 0:
        at += 1
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _zigzag(content, at)
        if kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(content, at, kind, depth)
    return fields, at + 1


def _value(content: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in _VARINTS:
        return _zigzag(content, at)
    if kind in (_TRUE, _FALSE, _BYTE):
        return _byte(content, at), at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if kind == _BINARY:
        size, at = _varint(content, at)
        if at + size > len(content):
            raise ValueError("a text is longer than what there is")
        return content[at : at + size], at + size
    if kind == _LIST:
        return _entries(content, at, depth)
    if kind == _STRUCT:
        return read_struct(content, at, depth + 1)
    raise ValueError(f"there is no type {kind}")


def _entries(content: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    head = _byte(content, at)
    count, kind, at = head >> 4, head & 15, at + 1
    if count == 15:
        count, at = _varint(content, at)
    if count > len(content) - at:  # each takes a byte at least
        raise ValueError(f"a list of {count} entries is longer than what there is")
    entries = []
    for _ in range(count):
        entry, at = _value(content, at, kind, depth)
        entries.append(entry)
    return entries, at


def _byte(content: bytes, at: int) -> int:
    if at >= len(content):
        raise ValueError("the end is missing")
    return content[at]


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = _byte(content, at)
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
        if shift > 70:
            raise ValueError("a number has more than 64 bits")


def _zigzag(content: bytes, at: int) -> tuple[int, int]:
    number, at = _varint(content, at)
    return (number >> 1) ^ -(number & 1), at

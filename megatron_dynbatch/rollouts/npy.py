"""Arrays of numbers as .npy bytes (numpy.lib.format, version 1.0), and back.

`numpy.load` takes memory by the shape in the header and can unpickle. Here an array is exactly the
bytes that are there, of a plain number type, or an error.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|=][biuf]\d{1,2})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}(?:, )?)*,?)\), \} *\n"
)


def npy_bytes(array: NDArray[Any]) -> bytes:
    """The array as `numpy.save` writes it."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def array_of_npy(content: Any) -> NDArray[Any]:
    """The array of such bytes, a copy.

    Raises:
        ValueError: They are none, or not as many as their header says.
    """
    view = memoryview(content)
    start = 10 + int.from_bytes(view[8:10], "little")
    header = _HEADER.fullmatch(view[10:start])
    if bytes(view[:8]) != _MAGIC or header is None:
        raise ValueError("an array is not stored as .npy of plain numbers; it is damaged")
    try:
        dtype = np.dtype(header[1].decode())
    except TypeError as error:
        raise ValueError(f"an array has no such type: {error}") from error
    shape = tuple(int(size) for size in re.findall(rb"\d+", header[3]))
    if math.prod(shape) * dtype.itemsize != len(view) - start:
        raise ValueError(
            f"an array of shape {list(shape)} and type {dtype} does not have {len(view) - start} "
            "bytes; it is damaged"
        )
    order: Any = "F" if header[2] == b"True" else "C"
    return np.frombuffer(view[start:], dtype).reshape(shape, order=order).copy(order)

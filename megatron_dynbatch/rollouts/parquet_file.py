"""Opens a Parquet file of a rollout batch, and believes its footer only as far as the file goes.

Invariants (asserted by the tests): before anything but the footer is read, it is as small as the
footers of such a file are, and says nothing that cannot be (`parquet_footer`). Any sign of damage
is one kind of error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.parquet_footer import RowGroup, read_footer

_MAGIC = b"PAR1"
_FOOTER_BYTES, _FOOTER_SHARE, _MOST_FOOTER_BYTES = 1 << 19, 32, 1 << 24
"""A footer has at most so many bytes and this part of its file; ours have less than a 200th. No
footer has more than the last, which a part of some 300 GB would."""


@dataclass(frozen=True)
class Blob:
    """A Parquet file in memory.

    Attributes:
        name: What it is called in errors.
        content: Bytes-like, not copied.
    """

    name: str
    content: Any

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class CheckedFile:
    """A file of which it is known what its footer must be.

    Attributes:
        path: Where it is.
        footer_crc: See `footer_crc`.
    """

    path: Path
    footer_crc: int

    def __str__(self) -> str:
        return str(self.path)


Stored = Path | Blob | CheckedFile


class OpenFile(NamedTuple):
    """A file whose footer can be true.

    Attributes:
        raw: `pyarrow.NativeFile`.
        parquet: The same as `pyarrow.parquet.ParquetFile`.
        row_groups: What its footer says.
    """

    raw: Any
    parquet: Any
    row_groups: tuple[RowGroup, ...]


@contextmanager
def open_parquet(source: Stored) -> Iterator[OpenFile]:
    """Opens a file.

    Raises:
        FileNotFoundError: There is no such file.
        RolloutDataError: It is damaged, or claims more than it can hold.
    """
    try:
        with _open(source) as file:
            footer = _footer(file)
            if isinstance(source, CheckedFile) and zlib.crc32(footer) != source.footer_crc:
                raise RolloutDataError(
                    f"{source} is not the file that was written with its batch: it is damaged, or "
                    "a stale copy; look at the file system's caches, or write the batch again"
                )
            row_groups = read_footer(footer[:-8], file.size() - len(footer))
            metadata = pq.read_metadata(pa.BufferReader(footer))
            parquet = pq.ParquetFile(
                file, metadata=metadata, pre_buffer=True, page_checksum_verification=True
            )
            yield OpenFile(file, parquet, row_groups)
    except (FileNotFoundError, PermissionError, RolloutDataError):
        raise
    except (pa.ArrowException, OSError, MemoryError, ValueError, OverflowError) as error:
        raise RolloutDataError(
            f"{source}: cannot be read as Parquet ({error}); it is damaged, truncated or something "
            "else: write the batch again"
        ) from error


def footer_crc(path: Path) -> int:
    """CRC-32 of a file's footer, the part of Parquet that has no checksum of its own."""
    with pa.OSFile(str(path)) as file:
        return zlib.crc32(_footer(file))


def check_types(source: Stored, schema: Any, required: Mapping[str, Any]) -> None:
    """Raises RolloutDataError if a column is missing or of another type."""
    for name, wanted in required.items():
        if name not in schema.names:
            names = schema.names[:50] + ["…"] * (len(schema.names) > 50)
            raise RolloutDataError(
                f"{source}: column {name} is missing (there are {names}); "
                "write the batch with this package"
            )
        if schema.names.count(name) > 1:
            raise RolloutDataError(
                f"{source}: column {name} is there twice; write the batch with this package"
            )
        if schema.field(name).type != wanted:
            raise RolloutDataError(
                f"{source}: column {name} has type {schema.field(name).type}, not {wanted}; "
                "write the batch with this package"
            )


def _open(source: Stored) -> Any:
    if isinstance(source, Blob):
        return pa.BufferReader(pa.py_buffer(source.content))
    return pa.OSFile(str(source))


def _footer(file: Any) -> bytes:
    """The footer with its length and magic, and nothing else of the file (Parquet's format)."""
    size = file.size()
    end = file.read_at(8, max(0, size - 8))
    length = int.from_bytes(end[:4], "little")
    if end[4:] != _MAGIC or length + 8 > size:
        raise OSError("no Parquet footer at the end")
    if length > min(_FOOTER_BYTES + size // _FOOTER_SHARE, _MOST_FOOTER_BYTES):
        raise OSError(f"a footer of {length} bytes in a file of {size}")
    return file.read_at(length, size - 8 - length) + end

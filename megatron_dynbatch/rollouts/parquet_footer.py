"""What the footer of a Parquet file says, read without pyarrow.

pyarrow takes memory by what a footer says, and ends the process where the columns of a row group
are not those of the schema. So the footer is read here first, and held against the file. Invariant
(asserted by the tests): what passes has the columns of its schema in each row group, with rows and
columns as many as a batch may have, stored inside the file, no byte twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dynbatch.rollouts.limits import MAX_BATCH_ROWS, MAX_COLUMNS
from megatron_dynbatch.rollouts.thrift_compact import read_struct

_FIRST_BYTE = 4  # the magic stands before it
_MOST_COLUMNS = MAX_COLUMNS + 16

CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")
ENCODINGS = (
    "PLAIN", "?", "PLAIN_DICTIONARY", "RLE", "BIT_PACKED", "DELTA_BINARY_PACKED",
    "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "RLE_DICTIONARY", "BYTE_STREAM_SPLIT",
)  # fmt: skip


@dataclass(frozen=True)
class Chunk:
    """A column of a row group.

    Attributes:
        name: Of the column.
        codec: One of `CODECS`.
        encodings: Some of `ENCODINGS`.
        start: First byte of its pages in the file.
        end: Byte behind them.
        has_dictionary: Whether its first page is a dictionary.
    """

    name: str
    codec: str
    encodings: tuple[str, ...]
    start: int
    end: int
    has_dictionary: bool


@dataclass(frozen=True)
class RowGroup:
    """Rows that are stored together.

    Attributes:
        num_rows: Their number.
        chunks: Their columns, in the order of the schema.
    """

    num_rows: int
    chunks: tuple[Chunk, ...]


def read_footer(content: bytes, num_bytes: int) -> tuple[RowGroup, ...]:
    """The row groups that a footer describes.

    Args:
        content: The footer, without its length and magic.
        num_bytes: Bytes of the file before the footer.

    Raises:
        ValueError: It is damaged, or claims more than a batch or the file can hold.
    """
    try:
        fields, _ = read_struct(content)
        leaves = list(_leaves(fields[2]))
        groups = tuple(_row_group(group, leaves) for group in fields[4])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"the footer is damaged ({error!r})") from error
    _check_sizes(groups, fields.get(3), num_bytes)
    return groups


def _leaves(schema: Sequence[dict[int, Any]]) -> Iterator[tuple[list[bytes], int]]:
    """Path and physical type of each column; the schema is a tree, depth first."""
    path: list[bytes] = []
    open_children = [schema[0].get(5, 0)]
    num_leaves = 0
    for element in schema[1:]:
        while open_children and open_children[-1] == 0:
            open_children.pop()
            path = path[: max(0, len(open_children) - 1)]
        open_children[-1] -= 1
        if 1 in element:
            num_leaves += 1
            if num_leaves > _MOST_COLUMNS:
                raise ValueError(f"more than {MAX_COLUMNS} columns")
            yield [*path, element[4]], element[1]
        else:
            path = [*path, element[4]]
            open_children.append(element[5])
            if len(path) > 4:
                raise ValueError("columns are nested too deeply")
    if any(open_children):
        raise ValueError("the schema is not whole")


def _row_group(group: dict[int, Any], leaves: Sequence[tuple[list[bytes], int]]) -> RowGroup:
    if len(group[1]) != len(leaves):
        raise ValueError(f"a row group has {len(group[1])} columns, the schema {len(leaves)}")
    chunks = [_chunk(chunk[3], *leaf) for chunk, leaf in zip(group[1], leaves, strict=True)]
    return RowGroup(group[3], tuple(chunks))


def _chunk(values: dict[int, Any], path: list[bytes], kind: int) -> Chunk:
    name = path[0].decode()
    if values[3] != path or values[1] != kind:
        raise ValueError(f"column {name} of a row group is not that of the schema")
    start = values[9]
    if has_dictionary := 11 in values:
        start = min(start, values[11])
    encodings = tuple(ENCODINGS[encoding] for encoding in values[2])
    end = start + values[7]
    return Chunk(name, CODECS[values[4]], encodings, start, end, has_dictionary)


def _check_sizes(groups: Sequence[RowGroup], num_rows: Any, num_bytes: int) -> None:
    counts = [group.num_rows for group in groups]
    if min(counts, default=0) < 0 or sum(counts) > MAX_BATCH_ROWS or sum(counts) != num_rows:
        raise ValueError(f"{num_rows} rows, {sum(counts)} in row groups; at most {MAX_BATCH_ROWS}")
    total = 0
    for chunk in (chunk for group in groups for chunk in group.chunks):
        total += chunk.end - chunk.start
        if not _FIRST_BYTE <= chunk.start <= chunk.end <= num_bytes or total > num_bytes:
            raise ValueError(
                f"column {chunk.name} is said to lie from byte {chunk.start} to {chunk.end}, "
                f"all columns so far to have {total}, in {num_bytes} bytes"
            )

"""Reads single rows of a part, and hardly a byte more.

`parquet_write` leaves a column chunk as one plain, uncompressed page, so its values are the last
bytes of the chunk, row after row. How many bytes each row has follows from the index of the batch:
so the place of every cell is known, and only wanted cells are read. Page checksums do not help
there; each row has checksums of its own cells instead.

Invariant (asserted by the tests): what comes out equals what reading whole row groups gives, and
damage is an error that names file, row and column.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.columns import CHECKSUMS, REQUIRED_TYPES, checksum
from megatron_dynbatch.rollouts.errors import RolloutDataError

_WHOLE_GROUP = 0.9
"""From this share of its tokens on, a row group is read as a whole."""

_SMALL_GAP = 64
"""Bytes between two ranges that are read with them."""

type Spans = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Where cells begin and end in a file, in bits."""


@dataclass(frozen=True)
class PartCells:
    """How large the cells of a part are; entry i of each array is for its i-th row.

    Attributes:
        total_lengths: int64 [N], tokens.
        response_lengths: int64 [N], response tokens.
        sizes: Optional column → int [N]: −1 without a cell, else the bytes of a binary cell.
    """

    total_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    sizes: Mapping[str, NDArray[np.int64]]

    def is_few(self, start: int, count: int, members: Sequence[tuple[int, int]]) -> bool:
        """Whether so few of the rows from `start` on are wanted that they are read alone."""
        wanted = self.total_lengths[[position for _, position in members]].sum()
        return bool(wanted < _WHOLE_GROUP * self.total_lengths[start : start + count].sum())

    def bits(self, name: str, arrow_type: Any) -> NDArray[np.int64]:
        """int64 [N], bits that each row takes among the values of a column."""
        lengths = self.total_lengths if name == "tokens" else self.response_lengths
        if pa.types.is_list(arrow_type):
            bits = lengths * arrow_type.value_type.bit_width
        elif pa.types.is_binary(arrow_type):
            bits = 8 * (4 + self.sizes[name].astype(np.int64))  # a length stands before each
        else:
            bits = np.full(len(lengths), arrow_type.bit_width, np.int64)
        return np.where(self.sizes[name] < 0, 0, bits) if name in self.sizes else bits


def can_read_rows(file: Any) -> bool:
    """Whether the columns of a part were written as described above."""
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    return all(
        group.column(c).compression == "UNCOMPRESSED" and not group.column(c).has_dictionary_page
        for group in groups
        for c in range(group.num_columns)
    )


def read_rows(
    source: object,
    raw: Any,
    file: Any,
    cells: PartCells,
    group: int,
    start: int,
    members: Sequence[tuple[int, int]],
    names: Sequence[str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row and cells of some rows of a row group.

    Args:
        source: Named in errors.
        raw: The part, an open `pyarrow.NativeFile`.
        file: The same as a `pyarrow.parquet.ParquetFile`.
        cells: Sizes of all cells of the part.
        group: Number of the row group.
        start: Position of its first row in the part.
        members: Row of the batch and position in the part of each wanted row.
        names: Columns to read.

    Raises:
        RolloutDataError: A cell is damaged.
    """
    metadata = file.metadata.row_group(group)
    own = slice(start, start + metadata.num_rows)
    at = np.array([position for _, position in members], np.int64)
    schema = file.schema_arrow
    wanted = {*names, *(CHECKSUMS[name not in REQUIRED_TYPES] for name in names)}
    columns: dict[str, Spans] = {}
    for chunk in (metadata.column(c) for c in range(metadata.num_columns)):
        name = chunk.path_in_schema.partition(".")[0]
        if name in wanted:
            if name not in cells.sizes and name not in REQUIRED_TYPES and name not in CHECKSUMS:
                raise RolloutDataError(
                    f"{source}: the index does not say how large the cells of column {name} are; "
                    "index and part are of different batches: write the batch again"
                )
            bits = cells.bits(name, schema.field(name).type)[own]
            ends = np.cumsum(bits)
            first = 8 * _first_value(source, name, chunk, -(-int(bits.sum()) // 8))
            columns[name] = first + (ends - bits)[at - start], first + ends[at - start]
    pieces = _Pieces(raw, list(columns.values()))
    checked = [name for name in schema.names if name not in CHECKSUMS]
    for i, (row, position) in enumerate(members):
        found: dict[str, Any] = {}
        for name, (begins, ends) in columns.items():
            if name not in cells.sizes or cells.sizes[name][position] >= 0:
                begin, end = int(begins[i]), int(ends[i])
                content = pieces.cut(begin // 8, -(-end // 8))
                found[name] = _decoded(content, schema.field(name).type, begin % 8, end - begin)
        _check(source, row, found, checked, names)
        yield row, {name: found.get(name) for name in names}


def _first_value(source: object, name: str, chunk: Any, num_bytes: int) -> int:
    """Where the values of a chunk begin in the file: they are its last bytes."""
    if num_bytes > chunk.total_compressed_size:
        raise RolloutDataError(
            f"{source}: column {name} is smaller than the index says; index and part are of "
            "different batches: write the batch again"
        )
    return chunk.data_page_offset + chunk.total_compressed_size - num_bytes


class _Pieces:
    """The bytes of some cells, near ones read at once.

    Args:
        raw: An open `pyarrow.NativeFile`.
        spans: What is to be cut from it.
    """

    def __init__(self, raw: Any, spans: Sequence[Spans]) -> None:
        begins = np.concatenate([begins for begins, _ in spans]) // 8
        ends = -(-np.concatenate([ends for _, ends in spans]) // 8)
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        is_new = np.concatenate([[True], begins[1:] > ends[:-1] + _SMALL_GAP])
        self._begins = begins[is_new]
        last = ends[np.concatenate([is_new[1:], [True]])]
        lengths = last - self._begins
        self._content = [
            raw.read_at(length, begin)
            for begin, length in zip(self._begins.tolist(), lengths.tolist(), strict=True)
        ]

    def cut(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to `end` of the file."""
        piece = int(np.searchsorted(self._begins, begin, side="right")) - 1
        offset = begin - int(self._begins[piece])
        return self._content[piece][offset : offset + end - begin]


def _decoded(content: bytes, arrow_type: Any, skipped_bits: int, num_bits: int) -> Any:
    """A cell of its stored bytes (of a mask: of bytes in which its bits are)."""
    if pa.types.is_fixed_size_binary(arrow_type):
        return content
    if pa.types.is_binary(arrow_type):
        return content[4:]
    if not pa.types.is_list(arrow_type):
        return np.frombuffer(content, arrow_type.to_pandas_dtype())[0].item()
    if pa.types.is_boolean(arrow_type.value_type):
        bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")
        return bits[skipped_bits : skipped_bits + num_bits]
    return np.frombuffer(content, arrow_type.value_type.to_pandas_dtype())


def _check(
    source: object,
    row: int,
    found: Mapping[str, Any],
    stored: Sequence[str],
    names: Sequence[str],
) -> None:
    """Compare the cells of a row with their checksums."""
    required = [name for name in stored if name in REQUIRED_TYPES]
    optional = [name for name in stored if name not in REQUIRED_TYPES]
    for checksums, half in zip(CHECKSUMS, (required, optional), strict=True):
        for number, name in enumerate(half):
            if name not in names:
                continue
            stored_sum = found[checksums][4 * number : 4 * number + 4]
            if struct.pack("<I", checksum(name, found.get(name))) != stored_sum:
                raise RolloutDataError(
                    f"{source}: row {row}, column {name} is damaged (its checksum differs): write "
                    "the batch again"
                )

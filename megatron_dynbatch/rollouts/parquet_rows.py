"""Reads rows of a part, and hardly a byte more.

`parquet_write` leaves a column chunk as one plain, uncompressed page, so its values are the last
bytes of the chunk, row after row. How many bytes each row has follows from the index of the batch:
so the place of every cell is known, and only wanted cells are read. Page checksums do not help
there; each row has checksums of its own cells instead.

Invariants (asserted by the tests): what comes out equals what went in, damage is an error that
names file, row and column, and memory is taken for the bytes of wanted cells only, which lie in the
file: levels and counts in pages are never looked at.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.columns import CHECKSUMS, REQUIRED_TYPES
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.parquet_file import OpenFile
from megatron_dynbatch.rollouts.parquet_footer import Chunk, RowGroup

_SMALL_GAP = 64
"""Bytes between two ranges that are read with them."""

_ENCODINGS = {"PLAIN", "RLE"}
"""Of values, and of the levels before them."""

_NUMBERS = {pa.int64(): struct.Struct("<q"), pa.float64(): struct.Struct("<d")}


@dataclass(frozen=True)
class PartCells:
    """How large the cells of a part are; entry i of each array is for its i-th row.

    Attributes:
        total_lengths: int [N], tokens.
        response_lengths: int [N], response tokens.
        sizes: Optional column → int [N]: −1 without a cell, else the bytes of a binary cell.
    """

    total_lengths: NDArray[np.integer[Any]]
    response_lengths: NDArray[np.integer[Any]]
    sizes: Mapping[str, NDArray[np.integer[Any]]]

    def __len__(self) -> int:
        return len(self.total_lengths)

    def bits(self, name: str, arrow_type: Any, rows: slice) -> NDArray[np.int64]:
        """Bits that each of these rows takes among the values of a column."""
        lengths = self.total_lengths if name == "tokens" else self.response_lengths
        if pa.types.is_list(arrow_type):
            bits = lengths[rows].astype(np.int64) * arrow_type.value_type.bit_width
        elif pa.types.is_binary(arrow_type):
            bits = 8 * (4 + self.sizes[name][rows].astype(np.int64))  # a length stands before each
        else:
            bits = np.full(len(lengths[rows]), arrow_type.bit_width, np.int64)
        if name in self.sizes:
            bits[self.sizes[name][rows] < 0] = 0
        return bits


def check_layout(source: object, groups: Sequence[RowGroup], names: Collection[str]) -> None:
    """Checks that columns of a part are stored as described above.

    Raises:
        RolloutDataError: One is compressed, has a dictionary, or is otherwise encoded.
    """
    for chunk in (chunk for group in groups for chunk in group.chunks):
        is_plain = not chunk.has_dictionary and {*chunk.encodings} <= _ENCODINGS
        if chunk.name in names and not (is_plain and chunk.codec == "UNCOMPRESSED"):
            raise RolloutDataError(
                f"{source}: column {chunk.name} is stored as {chunk.codec} "
                f"{', '.join(chunk.encodings)}, not uncompressed and plain; write the batch with "
                "this package"
            )


class _Column:
    """A column of a row group: where the cells of the wanted rows are, and how they are read.

    Args:
        name: Of the column.
        arrow_type: Its type.
        begins: int64 [N], first bit of each cell in the file.
        ends: int64 [N], bit behind each cell.
        is_there: [N], whether a row has a cell.
    """

    def __init__(
        self,
        name: str,
        arrow_type: Any,
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        is_there: Sequence[bool],
    ) -> None:
        self.name = name
        self.is_there = is_there
        self.first_bytes = begins // 8
        self.end_bytes = -(-ends // 8)
        self.first_bits = (begins % 8).tolist()
        self.num_bits = (ends - begins).tolist()
        self._is_binary = pa.types.is_binary(arrow_type)
        self._is_mask = arrow_type == REQUIRED_TYPES["loss_mask"]
        self._dtype = arrow_type.value_type.to_pandas_dtype() if _is_array(arrow_type) else None
        self._number = _NUMBERS.get(arrow_type)

    def decoded(self, content: memoryview, i: int) -> tuple[Any, Any]:
        """Cell of the i-th wanted row, and the bytes that its checksum is over."""
        if self._number is not None:
            return self._number.unpack(content)[0], content
        if self._is_mask:
            bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")
            mask = bits[self.first_bits[i] : self.first_bits[i] + self.num_bits[i]]
            return mask, mask
        if self._dtype is not None:
            return np.frombuffer(content, self._dtype), content
        own = content[4:] if self._is_binary else content
        return own, own


def read_rows(
    source: object,
    file: OpenFile,
    cells: PartCells,
    group: int,
    start: int,
    members: Sequence[tuple[int, int]],
    names: Sequence[str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row and cells of some rows of a row group.

    Args:
        source: Named in errors.
        file: The part.
        cells: Sizes of all cells of the part.
        group: Number of the row group.
        start: Position of its first row in the part.
        members: Row of the batch and position in the part of each wanted row.
        names: Columns to read; stored as `check_layout` wants it.

    Raises:
        RolloutDataError: A cell is damaged.
    """
    columns = _columns(source, file, cells, group, start, members, names)
    views = _views(file.raw, columns)
    stored = [name for name in file.parquet.schema_arrow.names if name not in CHECKSUMS]
    numbers: dict[str, tuple[str, int]] = {}
    for half, is_required in zip(CHECKSUMS, (True, False), strict=True):
        own = [name for name in stored if (name in REQUIRED_TYPES) == is_required]
        numbers |= {name: (half, number) for number, name in enumerate(own)}
    sums_of = {half: struct.Struct(f"<{sum(h == half for h, _ in numbers.values())}I")
               for half in CHECKSUMS}  # fmt: skip
    for i, (row, _) in enumerate(members):
        sums = {
            column.name: sums_of[column.name].unpack(views[column.name][i])
            for column in columns
            if column.name in CHECKSUMS
        }
        found: dict[str, Any] = dict.fromkeys(names)
        for column in columns:
            if column.name in CHECKSUMS:
                continue
            own_sum = 0
            if column.is_there[i]:
                found[column.name], summed = column.decoded(views[column.name][i], i)
                own_sum = zlib.crc32(summed)
            half, number = numbers[column.name]
            if sums[half][number] != own_sum:
                raise RolloutDataError(
                    f"{source}: row {row}, column {column.name} is damaged (its checksum differs): "
                    "write the batch again"
                )
        yield row, found


def _columns(
    source: object,
    file: OpenFile,
    cells: PartCells,
    group: int,
    start: int,
    members: Sequence[tuple[int, int]],
    names: Sequence[str],
) -> list[_Column]:
    """The wanted columns and their checksums."""
    own = slice(start, start + file.row_groups[group].num_rows)
    at = np.array([position for _, position in members], np.int64)
    schema = file.parquet.schema_arrow
    wanted = {*names, *(CHECKSUMS[name not in REQUIRED_TYPES] for name in names)}
    columns: list[_Column] = []
    for chunk in file.row_groups[group].chunks:
        name = chunk.name
        if name not in wanted:
            continue
        if name not in cells.sizes and name not in REQUIRED_TYPES and name not in CHECKSUMS:
            raise RolloutDataError(
                f"{source}: the index does not say how large the cells of column {name} are; "
                "index and part are of different batches: write the batch again"
            )
        bits = cells.bits(name, schema.field(name).type, own)
        sizes = bits[at - start]
        ends = np.cumsum(bits, out=bits)
        first = 8 * _first_value(source, chunk, -(-int(ends[-1]) // 8))
        last = first + ends[at - start]
        is_there = [True] * len(at)
        if name in cells.sizes:
            is_there = (cells.sizes[name][at] >= 0).tolist()
        columns.append(_Column(name, schema.field(name).type, last - sizes, last, is_there))
    return columns


def _first_value(source: object, chunk: Chunk, num_bytes: int) -> int:
    """Where the values of a chunk begin in the file: they are its last bytes."""
    if num_bytes > chunk.end - chunk.start:
        raise RolloutDataError(
            f"{source}: column {chunk.name} is smaller than the index says; index and part are of "
            "different batches: write the batch again"
        )
    return chunk.end - num_bytes


def _views(raw: Any, columns: Sequence[_Column]) -> dict[str, list[memoryview]]:
    """The bytes of each cell of each column; near ones are read at once, and none is copied."""
    begins = np.concatenate([column.first_bytes for column in columns])
    ends = np.concatenate([column.end_bytes for column in columns])
    order = np.argsort(begins, kind="stable")
    begins, ends = begins[order], np.maximum.accumulate(ends[order])
    is_new = np.concatenate([[True], begins[1:] > ends[:-1] + _SMALL_GAP])
    firsts = begins[is_new]
    lengths = ends[np.concatenate([is_new[1:], [True]])] - firsts
    pieces = [
        memoryview(raw.read_at(length, first))
        for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
    ]
    views: dict[str, list[memoryview]] = {}
    for column in columns:
        piece = np.searchsorted(firsts, column.first_bytes, side="right") - 1
        offset = column.first_bytes - firsts[piece]
        end = column.end_bytes - firsts[piece]
        spans = zip(piece.tolist(), offset.tolist(), end.tolist(), strict=True)
        views[column.name] = [pieces[p][first:last] for p, first, last in spans]
    return views


def _is_array(arrow_type: Any) -> bool:
    return pa.types.is_list(arrow_type) and not pa.types.is_boolean(arrow_type.value_type)

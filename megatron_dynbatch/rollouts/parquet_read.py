"""Reads what `parquet_write` wrote: the index of a batch, or some samples of a part.

Only the footer and the columns asked for are read (pyarrow itself would start with the last 64 KiB
of a file). Invariants (asserted by the tests): what comes out equals what went in; a file that is
damaged, truncated or written by something else is a `RolloutDataError` naming it, and its row or
column.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.columns import (
    CELLS,
    INDEX_COLUMNS,
    INDEX_TYPES,
    OPTIONAL_TYPES,
    PLACE_COLUMNS,
    REQUIRED_TYPES,
    column_type,
    is_extra,
    sample_from_cells,
)
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.parquet_rows import PartCells, can_read_rows, read_rows
from megatron_dynbatch.rollouts.sample import OPTIONAL_FIELDS, Sample
from megatron_dynbatch.rollouts.validation import MAX_TOKEN_ID, validate_samples

_MAGIC = b"PAR1"


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


def read_index(source: Stored, vocab_size: int | None = None) -> SampleIndex:
    """Reads lengths and ids, no tokens.

    Args:
        source: From `write_index`.
        vocab_size: Token ids must be below it, if given.

    Raises:
        FileNotFoundError: There is no such file.
        RolloutDataError: The file is damaged, lacks a column, holds impossible lengths, or has
            token ids outside the vocabulary.
    """
    columns = _read_integers(source, list(INDEX_COLUMNS))
    max_token_ids = columns.pop("max_token_id")
    index = SampleIndex(**{f"{name}s": column for name, column in columns.items()})
    index.check(str(source))
    size = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    rows = np.flatnonzero((max_token_ids < 0) | (max_token_ids >= size))
    if rows.size:
        raise RolloutDataError(
            f"{source}: row {rows[0]}, tokens: id {max_token_ids[rows[0]]} is not below the "
            f"vocabulary size {size} ({rows.size} such rows); tokenize with the model's own"
        )
    return index


@dataclass(frozen=True)
class Places:
    """Where the samples of a batch are.

    Attributes:
        source: The index that says so.
        parts: int64 [S], part of each row.
        positions: int64 [S], position of each row in its part.
        total_lengths: int64 [S].
        response_lengths: int64 [S].
        sizes: Optional column → int [S], see `PartCells`.
    """

    source: Stored
    parts: NDArray[np.int64]
    positions: NDArray[np.int64]
    total_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]
    sizes: dict[str, NDArray[np.int64]]

    def by_part(self, rows: Sequence[int]) -> dict[int, dict[int, int]]:
        """Part → row → position in the part, of some rows.

        Raises:
            RolloutDataError: No such row.
        """
        places: dict[int, dict[int, int]] = {}
        size = len(self.parts)
        for row in rows:
            if not 0 <= row < size:
                raise RolloutDataError(
                    f"{self.source}: no row {row}; the batch has rows 0 to {size - 1}"
                )
            places.setdefault(int(self.parts[row]), {})[row] = int(self.positions[row])
        return places

    def cells(self, part: int) -> PartCells:
        """Sizes of the cells of a part."""
        rows = np.flatnonzero(self.parts == part)
        rows = rows[np.argsort(self.positions[rows])]
        sizes = {name: column[rows] for name, column in self.sizes.items()}
        return PartCells(self.total_lengths[rows], self.response_lengths[rows], sizes)


def read_places(source: Stored, fields: Collection[str] | None = None) -> Places:
    """Reads where the samples of a batch are.

    Args:
        source: From `write_index`.
        fields: Optional fields that are to be read; None: all.

    Raises:
        FileNotFoundError: There is no such file.
        RolloutDataError: The file is damaged or lacks a column.
    """
    with _open(source) as (_, file):
        sizes = [name for name in file.schema_arrow.names if name.startswith(CELLS)]
        _check_types(source, file.schema_arrow, INDEX_TYPES | dict.fromkeys(sizes, pa.int32()))
        if fields is not None and not fields:
            sizes = []
        names = [*PLACE_COLUMNS, "total_length", "response_length", *sizes]
        table = file.read(columns=names, use_threads=False)
    columns = {name: _integers(source, name, table.column(name)) for name in names}
    own_sizes = {name.removeprefix(CELLS): columns.pop(name) for name in sizes}
    part, position, total, response = columns.values()
    return Places(source, part, position, total, response, own_sizes)


def footer_crc(path: Path) -> int:
    """CRC-32 of a file's footer, the part of Parquet that has no checksum of its own."""
    with pa.OSFile(str(path)) as file:
        return zlib.crc32(_footer(file))


def check_fields(fields: Collection[str] | None, extras: Collection[str] = ()) -> None:
    """Raises RolloutDataError for a name that is no optional field and no stored extra."""
    unknown = set(fields or ()).difference(OPTIONAL_FIELDS, extras)
    if unknown:
        raise RolloutDataError(
            f"no optional field {sorted(unknown)}; there are {(*OPTIONAL_FIELDS, *sorted(extras))}"
        )


def read_part(
    sources: Sequence[Stored],
    positions: Mapping[int, int],
    fields: Collection[str] | None = None,
    vocab_size: int | None = None,
    part_cells: PartCells | None = None,
) -> dict[int, Sample]:
    """Reads some samples of a part, and hardly anything else.

    Args:
        sources: Files that hold the columns of the part; the first has tokens, masks and ids.
        positions: Row of the batch → position in the part.
        fields: Optional fields and extras to fill in; None: all that there are.
        vocab_size: Token ids must be below it, if given.
        part_cells: From the index; without them whole row groups are read.

    Returns:
        Row → sample.

    Raises:
        FileNotFoundError: There is no such file.
        RolloutDataError: No such field; or the part is damaged, lacks a column or a row, or holds
            samples that `validate_samples` rejects.
    """
    cells: dict[int, dict[str, Any]] = {row: {} for row in positions}
    for number, source in enumerate(sources):
        with _open(source) as (raw, file):
            names = _part_columns(source, file, fields, has_required=number == 0)
            for row, found in _read_cells(source, raw, file, names, positions, part_cells):
                cells[row] |= found
    first = sources[0]
    samples = {row: _sample(first, row, found) for row, found in cells.items()}
    if samples:
        numbers = list(samples)
        validate_samples(
            [samples[row] for row in numbers], vocab_size=vocab_size, rows=numbers, where=str(first)
        )
    return samples


@contextmanager
def _open(source: Stored) -> Iterator[tuple[Any, Any]]:
    """A file, also opened as Parquet; every sign of damage becomes one kind of error."""
    try:
        with (
            pa.BufferReader(pa.py_buffer(source.content))
            if isinstance(source, Blob)
            else pa.OSFile(str(source))
        ) as file:
            footer = _footer(file)
            if isinstance(source, CheckedFile) and zlib.crc32(footer) != source.footer_crc:
                raise RolloutDataError(
                    f"{source} is not the file that was written with its batch: it is damaged, or "
                    "a stale copy; look at the file system's caches, or write the batch again"
                )
            metadata = pq.read_metadata(pa.BufferReader(footer))
            parquet = pq.ParquetFile(
                file, metadata=metadata, pre_buffer=True, page_checksum_verification=True
            )
            yield file, parquet
    except (FileNotFoundError, PermissionError, RolloutDataError):
        raise
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise RolloutDataError(
            f"{source}: cannot be read as Parquet ({error}); it is damaged, truncated or something "
            "else: write the batch again"
        ) from error


def _footer(file: Any) -> Any:
    """The footer with its length and magic, and nothing else of the file (Parquet's format)."""
    size = file.size()
    end = file.read_at(8, max(0, size - 8))
    length = int.from_bytes(end[:4], "little")
    if end[4:] != _MAGIC or length + 8 > size:
        raise OSError("no Parquet footer at the end")
    return file.read_at(length, size - 8 - length) + end


def _read_integers(source: Stored, names: list[str]) -> dict[str, NDArray[np.int64]]:
    with _open(source) as (_, file):
        _check_types(source, file.schema_arrow, INDEX_TYPES)
        table = file.read(columns=names, use_threads=False)
    return {name: _integers(source, name, table.column(name)) for name in names}


def _check_types(source: Stored, schema: Any, required: Mapping[str, Any]) -> None:
    for name, wanted in required.items():
        if name not in schema.names:
            raise RolloutDataError(
                f"{source}: column {name} is missing (there are {schema.names}); "
                "write the batch with this package"
            )
        if schema.field(name).type != wanted:
            raise RolloutDataError(
                f"{source}: column {name} has type {schema.field(name).type}, not {wanted}; "
                "write the batch with this package"
            )


def _part_columns(
    source: Stored, file: Any, fields: Collection[str] | None, *, has_required: bool
) -> list[str]:
    """Names of the columns to read."""
    schema = file.schema_arrow
    optional = {n: column_type(n) for n in schema.names if n in OPTIONAL_TYPES or is_extra(n)}
    _check_types(source, schema, (REQUIRED_TYPES if has_required else {}) | optional)
    own_name = {name: name.rpartition("/")[2] for name in optional}
    check_fields(fields, [own_name[name] for name in optional if is_extra(name)])
    if fields is not None:
        wanted = {*fields, "token_advantages"} if "advantage" in fields else set(fields)
        optional = {name: t for name, t in optional.items() if own_name[name] in wanted}
    return [*(REQUIRED_TYPES if has_required else ()), *optional]


def _read_cells(
    source: Stored,
    raw: Any,
    file: Any,
    names: list[str],
    positions: Mapping[int, int],
    part_cells: PartCells | None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row and cells of each wanted sample."""
    if part_cells is not None and not can_read_rows(file):
        part_cells = None
    counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    ends = np.cumsum(counts, dtype=np.int64)
    for group, members in _by_group(source, positions, ends).items():
        start = int(ends[group]) - counts[group]
        if part_cells is not None and part_cells.is_few(start, counts[group], members):
            for row, found in read_rows(
                source, raw, file, part_cells, group, start, members, names
            ):
                _check_row(source, found, row, positions[row])
                yield row, found
            continue
        table = file.read_row_group(group, columns=names, use_threads=False)
        if names and table.num_rows != counts[group]:
            raise RolloutDataError(
                f"{source}: row group {group} has {table.num_rows} rows, its footer says "
                f"{counts[group]}; the file is damaged: write the batch again"
            )
        columns = {name: _column_cells(source, name, table.column(name)) for name in names}
        for row, position in members:
            cells = {name: column[position - start] for name, column in columns.items()}
            _check_row(source, cells, row, position)
            yield row, cells


def _check_row(source: Stored, cells: Mapping[str, Any], row: int, position: int) -> None:
    if cells.get("row", row) != row:
        raise RolloutDataError(
            f"{source}: position {position} holds row {cells['row']}, the index says row {row}; "
            "index and part are of different batches: write the batch again"
        )


def _by_group(
    source: Stored, positions: Mapping[int, int], ends: NDArray[np.int64]
) -> dict[int, list[tuple[int, int]]]:
    """Row group → (row, position) of its wanted samples, in file order."""
    num_samples = int(ends[-1]) if len(ends) else 0
    groups: dict[int, list[tuple[int, int]]] = {}
    for row, position in sorted(positions.items(), key=lambda item: item[1]):
        if not 0 <= position < num_samples:
            raise RolloutDataError(
                f"{source}: row {row} should be at position {position} of {num_samples}; the part "
                "is incomplete: write the batch again"
            )
        group = int(np.searchsorted(ends, position, side="right"))
        groups.setdefault(group, []).append((row, position))
    return groups


def _sample(source: Stored, row: int, cells: dict[str, Any]) -> Sample:
    for name in ("tokens", "loss_mask"):
        if cells[name] is None:
            raise RolloutDataError(f"{source}: row {row}, column {name} is empty")
    try:
        return sample_from_cells(cells)
    except (ValueError, EOFError) as error:
        raise RolloutDataError(f"{source}: row {row}, {error}") from error


def _column_cells(source: Stored, name: str, column: Any) -> Sequence[Any]:
    if pa.types.is_list(column.type):
        return _lists(source, name, column)
    if name in REQUIRED_TYPES:
        return _integers(source, name, column).tolist()
    return column.to_pylist()


def _integers(source: Stored, name: str, column: Any) -> NDArray[np.int64]:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise RolloutDataError(f"{source}: row {row}, column {name} is empty")
    return column.to_numpy()


def _lists(source: Stored, name: str, column: Any) -> list[NDArray[Any] | None]:
    array = pa.concat_arrays(column.chunks)
    offsets = array.offsets.to_numpy()
    if array.values.null_count:
        raise RolloutDataError(f"{source}: column {name} has an empty entry")
    values = array.values.to_numpy(zero_copy_only=False)  # a mask is stored in bits
    is_absent = array.is_null().to_numpy(zero_copy_only=False)
    return [
        None if absent else values[offsets[i] : offsets[i + 1]]
        for i, absent in enumerate(is_absent)
    ]

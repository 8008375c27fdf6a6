"""Reads the index of a batch: lengths and ids, and where each sample is in which part.

The index is compressed, so a small file can claim to be a large one. Invariant (asserted by the
tests): it is decompressed only if every page of it is as small as pages of so many rows are, and
the rows are no more than a batch may have.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.columns import CELLS, INDEX_COLUMNS, INDEX_TYPES, PLACE_COLUMNS
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import SampleIndex, is_row
from megatron_dynbatch.rollouts.limits import MAX_SAMPLE_TOKENS
from megatron_dynbatch.rollouts.parquet_file import OpenFile, Stored, check_types, open_parquet
from megatron_dynbatch.rollouts.parquet_pages import check_pages
from megatron_dynbatch.rollouts.parquet_rows import PartCells
from megatron_dynbatch.rollouts.validation import MAX_TOKEN_ID
from megatron_dynbatch.wording import short

_ROW_BYTES, _PAGE_BYTES = 16, 1 << 16
"""A page of N rows takes at most so many bytes a row, and these."""


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
    with open_parquet(source) as file:
        check_types(source, file.parquet.schema_arrow, INDEX_TYPES)
        columns = _read(source, file, list(INDEX_COLUMNS))
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
        parts: int32 [S], part of each row.
        positions: int32 [S], position of each row in its part.
        total_lengths: int32 [S].
        response_lengths: int32 [S].
        sizes: Optional column → int32 [S], see `PartCells`.
    """

    source: Stored
    parts: NDArray[np.int32]
    positions: NDArray[np.int32]
    total_lengths: NDArray[np.int32]
    response_lengths: NDArray[np.int32]
    sizes: dict[str, NDArray[np.int32]]

    def by_part(self, rows: Sequence[int]) -> dict[int, dict[int, int]]:
        """Part → row → position in the part, of some rows.

        Raises:
            RolloutDataError: No such row.
        """
        places: dict[int, dict[int, int]] = {}
        size = len(self.parts)
        for row in rows:
            if not is_row(row, size):
                raise RolloutDataError(
                    f"{self.source}: no row {short(row)}; the batch has rows 0 to {size - 1}"
                )
            places.setdefault(int(self.parts[row]), {})[row] = int(self.positions[row])
        return places

    def cells(self, part: int) -> PartCells:
        """Sizes of the cells of a part.

        Raises:
            RolloutDataError: Its rows have no position each.
        """
        rows = np.flatnonzero(self.parts == part)
        places = np.arange(len(rows), dtype=np.int32)
        if not np.array_equal(self.positions[rows], places):  # a planned part
            rows = rows[np.argsort(self.positions[rows], kind="stable")]
        elif len(rows) == len(self.parts):
            return PartCells(self.total_lengths, self.response_lengths, self.sizes)
        wrong = np.flatnonzero(self.positions[rows] != places)
        if wrong.size:
            raise RolloutDataError(
                f"{self.source}: part {part} should have {len(rows)} samples, but none is at "
                f"position {wrong[0]}; the index is damaged: write the batch again"
            )
        return self.cells_of(rows)

    def cells_of(self, rows: NDArray[np.int64]) -> PartCells:
        """Sizes of the cells of some rows, in this order."""
        sizes = {name: column[rows] for name, column in self.sizes.items()}
        return PartCells(self.total_lengths[rows], self.response_lengths[rows], sizes)


def read_places(source: Stored, fields: Collection[str] | None = None) -> Places:
    """Reads where the samples of a batch are.

    Args:
        source: From `write_index`.
        fields: Optional fields that are to be read; None: all.

    Raises:
        FileNotFoundError: There is no such file.
        RolloutDataError: The file is damaged, lacks a column, or holds impossible lengths.
    """
    with open_parquet(source) as file:
        schema = file.parquet.schema_arrow
        sizes = [name for name in schema.names if name.startswith(CELLS)]
        check_types(source, schema, INDEX_TYPES | dict.fromkeys(sizes, pa.int32()))
        if fields is not None and not fields:
            sizes = []
        names = [*PLACE_COLUMNS, "total_length", "response_length", *sizes]
        columns = _read(source, file, names)
    for name in ("total_length", "response_length"):
        lengths = columns[name]
        wrong = np.flatnonzero((lengths < 0) | (lengths > MAX_SAMPLE_TOKENS))
        if wrong.size:
            raise RolloutDataError(
                f"{source}: row {wrong[0]}, column {name} is {lengths[wrong[0]]}; a sample has at "
                f"most {MAX_SAMPLE_TOKENS} tokens"
            )
        columns[name] = lengths.astype(np.int32)
    own_sizes = {name.removeprefix(CELLS): columns.pop(name) for name in sizes}
    part, position, total, response = columns.values()
    return Places(source, part, position, total, response, own_sizes)


def _read(source: Stored, file: OpenFile, names: list[str]) -> dict[str, NDArray[Any]]:
    """Columns of integers."""
    for group in file.row_groups:
        most_bytes = _ROW_BYTES * group.num_rows + _PAGE_BYTES
        for chunk in group.chunks:
            if chunk.name in names:
                check_pages(file.raw, chunk, group.num_rows, most_bytes)
    table = file.parquet.read(columns=names, use_threads=False)
    return {name: _integers(source, name, table.column(name)) for name in names}


def _integers(source: Stored, name: str, column: Any) -> NDArray[Any]:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise RolloutDataError(f"{source}: row {row}, column {name} is empty")
    return column.to_numpy()

"""Writes the samples of a batch in Parquet: an index, and parts that hold the samples.

The index has one row per sample in row order: lengths, ids, the largest token id, and in which part
the sample is; a batch is planned and checked against a vocabulary from it. A planned batch has a
part for each data-parallel rank, in the order in which the rank trains, so that a rank reads one
file from start to end. A part names the row of each of its samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.columns import (
    INDEX_COLUMNS,
    INDEX_TYPES,
    OPTIONAL_TYPES,
    PLACE_COLUMNS,
    REQUIRED_TYPES,
    arrow_table,
    column_type,
    columns_of,
    is_extra,
    optional_cells,
    required_cells,
)
from megatron_dynbatch.rollouts.sample import Sample


@dataclass(frozen=True)
class RowGroups:
    """A row group ends at this many rows, or before the sample that would pass this many tokens."""

    rows: int
    tokens: int


SCATTERED = RowGroups(rows=32, tokens=1 << 16)
"""Where readers take rows here and there."""

CONTIGUOUS = RowGroups(rows=4096, tokens=1 << 20)
"""Where a reader takes the whole part."""


@dataclass(frozen=True)
class Parts:
    """How the samples of a batch are divided over parts.

    Attributes:
        rows: Rows of each part, in storage order.
        places: int32 [S, 2], part and position in it of each row.
        row_groups: How large row groups are.
    """

    rows: tuple[tuple[int, ...], ...]
    places: NDArray[np.int32]
    row_groups: RowGroups

    @classmethod
    def of(cls, num_samples: int, parts: Sequence[Sequence[int]] | None) -> Parts:
        """Parts as asked and one more for rows in none of them; one part by default.

        Raises:
            ValueError: A row that does not exist, or is in two places.
        """
        asked = [tuple(part) for part in parts or ()]
        places = np.full((num_samples, 2), -1, np.int32)
        for number, rows in enumerate(asked):
            for position, row in enumerate(rows):
                if not 0 <= row < num_samples or places[row, 0] >= 0:
                    raise ValueError(
                        f"part {number} of the batch: row {row} is not one of the {num_samples} "
                        "rows, or is in two places"
                    )
                places[row] = number, position
        rest = tuple(np.flatnonzero(places[:, 0] < 0).tolist())
        if rest:
            places[list(rest), 0] = len(asked)
            places[list(rest), 1] = np.arange(len(rest))
            asked.append(rest)
        return cls(tuple(asked), places, SCATTERED if parts is None else CONTIGUOUS)


def write_index(sink: Any, samples: Sequence[Sample], places: NDArray[np.int32]) -> None:
    """Writes the index of a batch.

    Args:
        sink: A binary file.
        samples: Of the batch, in row order.
        places: int32 [S, 2], part and position in it of each sample.
    """
    columns: dict[str, Sequence[Any]] = {
        name: [value(sample) for sample in samples] for name, value in INDEX_COLUMNS.items()
    }
    columns |= dict(zip(PLACE_COLUMNS, places.T.tolist(), strict=True))
    table = arrow_table(columns, INDEX_TYPES)
    pq.write_table(
        table,
        sink,
        row_group_size=max(1, len(samples)),
        compression="zstd",
        use_dictionary=["rollout_id", "group_id", "policy_version", "part"],
        column_encoding={
            name: "DELTA_BINARY_PACKED"
            for name in columns
            if name not in ("rollout_id", "group_id", "policy_version", "part")
        },
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    )


def write_part(
    sink: Any,
    samples: Sequence[Sample],
    rows: Sequence[int],
    *,
    row_groups: RowGroups = SCATTERED,
    required: bool = True,
    optional: bool = True,
) -> None:
    """Writes samples.

    Args:
        sink: A binary file.
        samples: Validated samples, in the order in which to store them.
        rows: Row of the batch that each of them is.
        row_groups: How large row groups are.
        required: Whether to store tokens, masks and ids.
        optional: Whether to store everything else.
    """
    cells = [
        (required_cells(sample, row) if required else {})
        | (optional_cells(sample) if optional else {})
        for sample, row in zip(samples, rows, strict=True)
    ]
    names = [*(REQUIRED_TYPES if required else ())]
    present = {name for row in cells for name in row}
    names += [name for name in OPTIONAL_TYPES if name in present]
    names += sorted(name for name in present if is_extra(name))
    types = {name: column_type(name) for name in names}
    if not names:
        return
    with pq.ParquetWriter(
        sink,
        pa.schema(list(types.items())),
        compression="zstd",
        use_dictionary=["tokens.list.element", "loss_mask.list.element"] if required else False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for group in _row_groups([sample.total_length for sample in samples], row_groups):
            table = arrow_table(columns_of((cells[i] for i in group), names), types)
            writer.write_table(table, row_group_size=len(group))


def _row_groups(lengths: Sequence[int], size: RowGroups) -> Iterator[range]:
    start = tokens = 0
    for row, length in enumerate(lengths):
        is_full = row - start == size.rows or tokens + length > size.tokens
        if is_full and row > start:
            yield range(start, row)
            start, tokens = row, 0
        tokens += length
    yield range(start, len(lengths))


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file to be written, which is on disk afterwards.

    Raises:
        OSError: The file exists or cannot be written (disk full, for example).
    """
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())

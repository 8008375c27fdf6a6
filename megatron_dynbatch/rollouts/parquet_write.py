"""Writes the samples of a batch in Parquet: an index, and parts that hold the samples.

The index has one row per sample in row order: lengths, ids, the largest token id, and in which part
the sample is; a batch is planned and checked against a vocabulary from it. A planned batch has a
part for each data-parallel rank, in the order in which the rank trains, so that a rank reads one
file from start to end. A part names the row of each of its samples.

Invariant (asserted by the tests): a column chunk of a part is one plain, uncompressed page, so that
its values are the last bytes of the chunk and any row can be read alone (`parquet_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.columns import (
    CELLS,
    CHECKSUMS,
    CONTENT_KEY,
    INDEX_COLUMNS,
    INDEX_TYPES,
    PLACE_COLUMNS,
    REQUIRED_TYPES,
    STAMP_KEY,
    arrow_table,
    cell_sizes,
    checksums,
    column_type,
    columns_of,
    is_extra,
    optional_cells,
    optional_names,
    required_cells,
)
from megatron_dynbatch.rollouts.content import content_of_samples
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import is_row
from megatron_dynbatch.rollouts.sample import PER_TOKEN_FIELDS, Sample
from megatron_dynbatch.wording import short

ROW_GROUP_ROWS = 4096
ROW_GROUP_BYTES = 1 << 26
"""A row group ends at this many rows, or before the sample that would pass this many bytes."""

_ONE_PAGE = 1 << 30


@dataclass(frozen=True)
class Parts:
    """How the samples of a batch are divided over parts.

    Attributes:
        rows: Rows of each part, in storage order.
        places: int32 [S, 2], part and position in it of each row.
    """

    rows: tuple[tuple[int, ...], ...]
    places: NDArray[np.int32]

    @classmethod
    def of(cls, num_samples: int, parts: Sequence[Sequence[int]] | None) -> Parts:
        """Parts as asked and one more for rows in none of them; one part by default.

        Raises:
            RolloutDataError: A row that does not exist, or is in two places.
        """
        asked = [tuple(part) for part in parts or ()]
        places = np.full((num_samples, 2), -1, np.int32)
        for number, rows in enumerate(asked):
            for position, row in enumerate(rows):
                if not is_row(row, num_samples) or places[row, 0] >= 0:
                    raise RolloutDataError(
                        f"part {number} of the batch: row {short(row)} is not one of the "
                        f"{num_samples} rows, or is in two places"
                    )
                places[row] = number, position
        rest = tuple(np.flatnonzero(places[:, 0] < 0).tolist())
        if rest:
            places[list(rest), 0] = len(asked)
            places[list(rest), 1] = np.arange(len(rest))
            asked.append(rest)
        return cls(tuple(asked), places)


def write_index(
    sink: Any, samples: Sequence[Sample], places: NDArray[np.int32], stamp: str = ""
) -> None:
    """Writes the index of a batch.

    Args:
        sink: A binary file.
        samples: Of the batch, in row order.
        places: int32 [S, 2], part and position in it of each sample.
        stamp: Unique to the batch, and the same in all its files.
    """
    columns: dict[str, Sequence[Any]] = {
        name: [value(sample) for sample in samples] for name, value in INDEX_COLUMNS.items()
    }
    columns |= dict(zip(PLACE_COLUMNS, places.T.tolist(), strict=True))
    sizes = cell_sizes([optional_cells(sample) for sample in samples])
    columns |= sizes
    repeating = {"rollout_id", "group_id", "policy_version", "part"}
    repeating |= {name for name in sizes if not is_extra(name.removeprefix(CELLS))}
    table = arrow_table(columns, {**INDEX_TYPES, **dict.fromkeys(sizes, pa.int32())})
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        use_dictionary=sorted(repeating),
        column_encoding={n: "DELTA_BINARY_PACKED" for n in columns if n not in repeating},
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.write_table(table, row_group_size=max(1, len(samples)))
        content = content_of_samples(samples)
        writer.add_key_value_metadata({STAMP_KEY: stamp, CONTENT_KEY: content})


def write_part(
    sink: Any,
    samples: Sequence[Sample],
    rows: Sequence[int],
    *,
    required: bool = True,
    optional: bool = True,
    stamp: str = "",
) -> None:
    """Writes samples.

    Args:
        sink: A binary file.
        samples: Validated samples, in the order in which to store them.
        rows: Row of the batch that each of them is.
        required: Whether to store tokens, masks and ids.
        optional: Whether to store everything else.
        stamp: As of `write_index`.
    """
    pairs = list(zip(samples, rows, strict=True))
    both = [
        _half(list(REQUIRED_TYPES), CHECKSUMS[0], [required_cells(s, r) for s, r in pairs])
        if required
        else {},
        _optional_half([optional_cells(s) for s, _ in pairs]) if optional else {},
    ]
    columns = {name: column for half in both for name, column in half.items()}
    if not columns:
        return
    types = {name: column_type(name) for name in columns}
    types |= {name: pa.binary(len(columns[name][0])) for name in CHECKSUMS if name in columns}
    with pq.ParquetWriter(
        sink,
        pa.schema(list(types.items())),
        compression="none",
        use_dictionary=False,
        data_page_size=_ONE_PAGE,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        for group in _row_groups([_num_bytes(sample) for sample in samples]):
            members = {name: column[group.start : group.stop] for name, column in columns.items()}
            writer.write_table(arrow_table(members, types), row_group_size=len(group))
        writer.add_key_value_metadata({STAMP_KEY: stamp})


def _half(
    names: list[str], checksums_name: str, cells: Sequence[dict[str, Any]]
) -> dict[str, list[Any]]:
    """Columns of these names, and their checksums."""
    return columns_of(cells, names) | {checksums_name: [checksums(c, names) for c in cells]}


def _optional_half(cells: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    names = optional_names(cells)
    return _half(names, CHECKSUMS[1], cells) if names else {}


def _num_bytes(sample: Sample) -> int:
    """Roughly what a sample takes in a part."""
    arrays = [*sample.token_arrays.values(), *sample.response_arrays.values()]
    per_token = sum(getattr(sample, name) is not None for name in PER_TOKEN_FIELDS)
    own = 4 * sample.total_length + 4 * (1 + per_token) * sample.response_length
    return own + sum(a.nbytes for a in arrays) + sum(map(len, sample.blobs.values()))


def _row_groups(num_bytes: Sequence[int]) -> Iterator[range]:
    start = total = 0
    for row, size in enumerate(num_bytes):
        is_full = row - start == ROW_GROUP_ROWS or total + size > ROW_GROUP_BYTES
        if is_full and row > start:
            yield range(start, row)
            start, total = row, 0
        total += size
    yield range(start, len(num_bytes))

"""Reads samples of a part, as `parquet_write` wrote it.

Only the footer and the wanted cells are read (`parquet_rows`). Invariants (asserted by the tests):
what comes out equals what went in; a file that is damaged, truncated or written by something else
is a `RolloutDataError` naming it, and its row or column.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.columns import (
    CHECKSUMS,
    OPTIONAL_TYPES,
    REQUIRED_TYPES,
    column_type,
    is_extra,
    sample_from_cells,
)
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.parquet_file import OpenFile, Stored, check_types, open_parquet
from megatron_dynbatch.rollouts.parquet_rows import PartCells, check_layout, read_rows
from megatron_dynbatch.rollouts.sample import OPTIONAL_FIELDS, Sample
from megatron_dynbatch.rollouts.validation import validate_samples


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
    part_cells: PartCells,
    fields: Collection[str] | None = None,
    vocab_size: int | None = None,
) -> dict[int, Sample]:
    """Reads some samples of a part, and hardly anything else.

    Args:
        sources: Files that hold the columns of the part; the first has tokens, masks and ids.
        positions: Row of the batch → position in the part.
        part_cells: Sizes of all its cells, from the index.
        fields: Optional fields and extras to fill in; None: all that there are.
        vocab_size: Token ids must be below it, if given.

    Returns:
        Row → sample.

    Raises:
        FileNotFoundError: There is no such file.
        RolloutDataError: No such field; or the part is damaged, otherwise encoded, lacks a column
            or a row, or holds samples that `validate_samples` rejects.
    """
    cells: dict[int, dict[str, Any]] = {row: {} for row in positions}
    for number, source in enumerate(sources):
        with open_parquet(source) as file:
            names = _part_columns(source, file.parquet, fields, has_required=number == 0)
            for row, found in _read_cells(source, file, names, positions, part_cells):
                cells[row] |= found
    first = sources[0]
    samples = {row: _sample(first, row, found) for row, found in cells.items()}
    if samples:
        numbers = list(samples)
        validate_samples(
            [samples[row] for row in numbers], vocab_size=vocab_size, rows=numbers, where=str(first)
        )
    return samples


def _part_columns(
    source: Stored, file: Any, fields: Collection[str] | None, *, has_required: bool
) -> list[str]:
    """Names of the columns to read."""
    schema = file.schema_arrow
    optional = {n: column_type(n) for n in schema.names if n in OPTIONAL_TYPES or is_extra(n)}
    halves = (REQUIRED_TYPES if has_required else {}, optional)
    sums = {c: pa.binary(4 * len(half)) for c, half in zip(CHECKSUMS, halves, strict=True) if half}
    check_types(source, schema, {**halves[0], **optional, **sums})
    own_name = {name: name.rpartition("/")[2] for name in optional}
    check_fields(fields, [own_name[name] for name in optional if is_extra(name)])
    if fields is not None:
        wanted = {*fields, "token_advantages"} if "advantage" in fields else set(fields)
        optional = {name: t for name, t in optional.items() if own_name[name] in wanted}
    return [*(REQUIRED_TYPES if has_required else ()), *optional]


def _read_cells(
    source: Stored,
    file: OpenFile,
    names: list[str],
    positions: Mapping[int, int],
    part_cells: PartCells,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row and cells of each wanted sample."""
    check_layout(source, file.row_groups, {*names, *CHECKSUMS})
    counts = [group.num_rows for group in file.row_groups]
    ends = np.cumsum(counts, dtype=np.int64)
    groups = _by_group(source, positions, ends)
    if sum(counts) != len(part_cells):
        raise RolloutDataError(
            f"{source}: it holds {sum(counts)} samples, the index says {len(part_cells)}; index "
            "and part are of different batches: write the batch again"
        )
    for group, members in groups.items():
        start = int(ends[group]) - counts[group]
        for row, found in read_rows(source, file, part_cells, group, start, members, names):
            _check_row(source, found, row, positions[row])
            yield row, found


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



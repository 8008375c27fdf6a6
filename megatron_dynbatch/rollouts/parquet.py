"""The samples of a batch as one Parquet file.

One row per sample, in small row groups so that a reader of a few rows reads little more. Lengths,
ids and the largest token id are columns of their own, so that a batch can be planned and checked
against a vocabulary without reading a token.

Invariants (asserted by the tests): what comes out equals what went in; a file that is damaged,
truncated or written by something else is a `RolloutDataError` naming it, and its row or column.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.sample import OPTIONAL_FIELDS, PER_TOKEN_FIELDS, Sample
from megatron_dynbatch.rollouts.validation import MAX_TOKEN_ID, validate_samples

ROW_GROUP_ROWS = 32
ROW_GROUP_TOKENS = 65_536
"""A row group ends at this many rows, or before the sample that would pass this many tokens."""

_INDEX_COLUMNS: dict[str, Callable[[Sample], int]] = {
    "total_length": lambda sample: sample.total_length,
    "response_length": lambda sample: sample.response_length,
    "mask_sum": lambda sample: sample.mask_sum,
    "rollout_id": lambda sample: -1 if sample.rollout_id is None else sample.rollout_id,
    "group_id": lambda sample: -1 if sample.group_id is None else sample.group_id,
    "max_token_id": lambda sample: int(sample.tokens.max()),
}
_FLOATS = pa.list_(pa.float32())
_TYPES: dict[str, Any] = {
    **dict.fromkeys(_INDEX_COLUMNS, pa.int64()),
    "tokens": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.uint8()),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "token_advantages": _FLOATS,  # the per-token form of `advantage`
    **dict.fromkeys(PER_TOKEN_FIELDS, _FLOATS),
}
_REQUIRED = (*_INDEX_COLUMNS, "tokens", "loss_mask")


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Writes validated samples to a new file.

    Raises:
        OSError: The file exists or cannot be written (disk full, for example).
    """
    cells = [_cells(sample) for sample in samples]
    optional = [name for name in _TYPES if name not in _REQUIRED]
    names = [*_REQUIRED, *(n for n in optional if any(row[n] is not None for row in cells))]
    schema = pa.schema([(name, _TYPES[name]) for name in names])
    with (
        open(path, "xb") as file,
        pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            use_dictionary=["tokens.list.element", "loss_mask.list.element"],
            write_statistics=False,
            write_page_checksum=True,
            store_schema=False,
        ) as writer,
    ):
        for rows in _row_groups([sample.total_length for sample in samples]):
            columns = [_arrow_column(name, [cells[row][name] for row in rows]) for name in names]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=len(rows))


def read_index(path: Path, vocab_size: int | None = None) -> SampleIndex:
    """Reads lengths and ids, no tokens.

    Args:
        path: A file from `write_samples`.
        vocab_size: Token ids must be below it, if given.

    Raises:
        FileNotFoundError: There is no such file.
        RolloutDataError: The file is damaged, lacks a column, holds impossible lengths, or has
            token ids outside the vocabulary.
    """
    with _open(path) as file:
        _check_columns(path, file.schema_arrow)
        table = file.read(columns=list(_INDEX_COLUMNS), use_threads=False)
    columns = {name: _integers(path, name, table.column(name)) for name in _INDEX_COLUMNS}
    max_token_ids = columns.pop("max_token_id")
    index = SampleIndex(**{f"{name}s": column for name, column in columns.items()})
    index.check(str(path))
    size = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    rows = np.flatnonzero((max_token_ids < 0) | (max_token_ids >= size))
    if rows.size:
        raise RolloutDataError(
            f"{path}: row {rows[0]}, tokens: id {max_token_ids[rows[0]]} is not below the "
            f"vocabulary size {size} ({rows.size} such rows); tokenize with the model's own"
        )
    return index


def read_rows(
    path: Path,
    rows: Sequence[int],
    fields: Collection[str] | None = None,
    vocab_size: int | None = None,
) -> list[Sample]:
    """Reads some rows, in the order asked, and only the row groups that hold them.

    Args:
        path: A file from `write_samples`.
        rows: Row numbers; one may be asked for twice.
        fields: Optional fields to fill in; None: all that the file has.
        vocab_size: Token ids must be below it, if given.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: No such row or field.
        RolloutDataError: The file is damaged, lacks a column, or holds samples that
            `validate_samples` rejects.
    """
    wanted = set(OPTIONAL_FIELDS if fields is None else fields)
    if unknown := wanted.difference(OPTIONAL_FIELDS):
        raise ValueError(f"no optional field {sorted(unknown)}; there are {OPTIONAL_FIELDS}")
    with _open(path) as file:
        _check_columns(path, file.schema_arrow)
        if "advantage" in wanted:
            wanted.add("token_advantages")
        names = [n for n in file.schema_arrow.names if n in _REQUIRED or n in wanted]
        counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        ends = np.cumsum(counts, dtype=np.int64)
        by_row: dict[int, Sample] = {}
        for group, members in _rows_by_group(path, rows, ends).items():
            table = file.read_row_group(group, columns=names, use_threads=False)
            if table.num_rows != counts[group]:
                raise RolloutDataError(
                    f"{path}: row group {group} has {table.num_rows} rows, its footer says "
                    f"{counts[group]}; the file is damaged: write the batch again"
                )
            by_row.update(_decode(path, table, int(ends[group]) - counts[group], members))
    numbers = list(by_row)
    if numbers:
        validate_samples(
            list(by_row.values()), vocab_size=vocab_size, rows=numbers, where=str(path)
        )
    return [by_row[row] for row in rows]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Opens a Parquet file and turns every sign of damage into one kind of error."""
    try:
        with pa.OSFile(str(path)) as file:
            yield pq.ParquetFile(file, pre_buffer=True, page_checksum_verification=True)
    except (FileNotFoundError, PermissionError, RolloutDataError):
        raise
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise RolloutDataError(
            f"{path}: cannot be read as Parquet ({error}); it is damaged, truncated or something "
            "else: write the batch again"
        ) from error


def _check_columns(path: Path, schema: Any) -> None:
    for name, wanted in _TYPES.items():
        if name not in schema.names:
            if name in _REQUIRED:
                raise RolloutDataError(
                    f"{path}: column {name} is missing (there are {schema.names}); "
                    "write the batch with RolloutDirectory.write"
                )
        elif schema.field(name).type != wanted:
            raise RolloutDataError(
                f"{path}: column {name} has type {schema.field(name).type}, not {wanted}; "
                "write the batch with RolloutDirectory.write"
            )


def _cells(sample: Sample) -> dict[str, Any]:
    """The value of every column for one sample, None where it has none."""
    per_token = isinstance(sample.advantage, np.ndarray)
    return {
        **{name: value(sample) for name, value in _INDEX_COLUMNS.items()},
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask,
        "reward": sample.reward,
        "advantage": None if per_token else sample.advantage,
        "token_advantages": sample.advantage if per_token else None,
        **{name: getattr(sample, name) for name in PER_TOKEN_FIELDS},
    }


def _arrow_column(name: str, cells: Sequence[Any]) -> Any:
    arrow_type = _TYPES[name]
    if not pa.types.is_list(arrow_type):
        return pa.array(cells, arrow_type)
    lists = [() if cell is None else cell for cell in cells]
    offsets = np.concatenate([[0], np.cumsum([len(cell) for cell in lists])])
    values = np.concatenate(lists).astype(arrow_type.value_type.to_pandas_dtype())
    absent = pa.array([cell is None for cell in cells])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), mask=absent)


def _row_groups(lengths: Sequence[int]) -> Iterator[range]:
    start = tokens = 0
    for row, length in enumerate(lengths):
        is_full = row - start == ROW_GROUP_ROWS or tokens + length > ROW_GROUP_TOKENS
        if is_full and row > start:
            yield range(start, row)
            start, tokens = row, 0
        tokens += length
    yield range(start, len(lengths))


def _rows_by_group(
    path: Path, rows: Sequence[int], ends: NDArray[np.int64]
) -> dict[int, list[int]]:
    num_rows = int(ends[-1]) if len(ends) else 0
    by_group: dict[int, list[int]] = {}
    for row in sorted(set(rows)):
        if not 0 <= row < num_rows:
            raise ValueError(f"{path}: no row {row}; the batch has rows 0 to {num_rows - 1}")
        by_group.setdefault(int(np.searchsorted(ends, row, side="right")), []).append(row)
    return by_group


def _decode(path: Path, table: Any, start: int, rows: Sequence[int]) -> dict[int, Sample]:
    """Makes samples of some rows of a row group whose first row is row `start` of the file."""
    columns: dict[str, Sequence[Any]] = {}
    for name in table.column_names:
        column = table.column(name)
        if name in _INDEX_COLUMNS:
            columns[name] = _integers(path, name, column, start).tolist()
        elif pa.types.is_list(_TYPES[name]):
            columns[name] = _lists(path, name, column, start)
        else:
            columns[name] = column.to_pylist()
    return {
        row: _sample(path, row, {name: cells[row - start] for name, cells in columns.items()})
        for row in rows
    }


def _sample(path: Path, row: int, cells: dict[str, Any]) -> Sample:
    stored = {name: cells.pop(name) for name in _INDEX_COLUMNS}
    token_advantages = cells.pop("token_advantages", None)
    if token_advantages is not None:
        cells["advantage"] = token_advantages
    for name in ("tokens", "loss_mask"):
        if cells[name] is None:
            raise RolloutDataError(f"{path}: row {row}, column {name} is empty")
    try:
        ids = {name: stored[name] for name in ("rollout_id", "group_id")}
        sample = Sample(**cells, **ids)
    except ValueError as error:
        raise RolloutDataError(f"{path}: row {row}, {error}") from error
    for name, value in _INDEX_COLUMNS.items():
        found = value(sample) if sample.total_length else 0
        if found != stored[name]:
            raise RolloutDataError(
                f"{path}: row {row}, column {name} says {stored[name]}, its tokens and mask say "
                f"{found}; the file is damaged: write the batch again"
            )
    return sample


def _integers(path: Path, name: str, column: Any, start: int = 0) -> NDArray[np.int64]:
    if column.null_count:
        row = start + int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise RolloutDataError(f"{path}: row {row}, column {name} is empty")
    return column.to_numpy()


def _lists(path: Path, name: str, column: Any, start: int) -> list[NDArray[Any] | None]:
    array = pa.concat_arrays(column.chunks)
    offsets = array.offsets.to_numpy()
    if array.values.null_count:
        position = np.flatnonzero(array.values.is_null().to_numpy(zero_copy_only=False))[0]
        row = start + int(np.searchsorted(offsets, position, side="right")) - 1
        raise RolloutDataError(f"{path}: row {row}, column {name} has an empty entry")
    values = array.values.to_numpy()
    is_absent = array.is_null().to_numpy(zero_copy_only=False)
    return [
        None if absent else values[offsets[i] : offsets[i + 1]]
        for i, absent in enumerate(is_absent)
    ]

"""Samples ↔ columns of a Parquet table: names, types, and the cells of each sample.

A batch is stored as an index (`INDEX_TYPES`, one row per sample in row order) and parts that hold
the samples themselves (`REQUIRED_TYPES`, `OPTIONAL_TYPES` and a binary column per array or blob of
the user's own). The index also tells for each optional column of the parts which rows have a cell
(`CELLS`), so that the place of every cell in a part follows from the index.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.limits import MAX_COLUMNS
from megatron_dynbatch.rollouts.npy import array_of_npy, npy_bytes
from megatron_dynbatch.rollouts.sample import EXTRA_KINDS, PER_TOKEN_FIELDS, Sample

LENGTHS: dict[str, Callable[[Sample], int]] = {
    "total_length": lambda sample: sample.total_length,
    "response_length": lambda sample: sample.response_length,
    "mask_sum": lambda sample: sample.mask_sum,
}
IDS: dict[str, Callable[[Sample], int]] = {
    "rollout_id": lambda sample: -1 if sample.rollout_id is None else sample.rollout_id,
    "group_id": lambda sample: -1 if sample.group_id is None else sample.group_id,
    "policy_version": lambda sample: -1 if sample.policy_version is None else sample.policy_version,
}
INDEX_COLUMNS: dict[str, Callable[[Sample], int]] = {
    **LENGTHS,
    **IDS,
    "max_token_id": lambda sample: int(sample.tokens.max()),
}
PLACE_COLUMNS = ("part", "part_row")
"""Which part a sample is in, and where in it."""

STAMP_KEY = "megatron_dynbatch.stamp"
"""Metadata of a file: unique to the batch, so that files of two batches are never mixed."""

CONTENT_KEY = "megatron_dynbatch.content"
"""Metadata of an index: what its batch holds (`rollouts.content`)."""

INDEX_TYPES: dict[str, Any] = {
    **dict.fromkeys(INDEX_COLUMNS, pa.int64()),
    **dict.fromkeys(PLACE_COLUMNS, pa.int32()),
}
REQUIRED_TYPES: dict[str, Any] = {
    "row": pa.int64(),
    **dict.fromkeys(IDS, pa.int64()),
    "tokens": pa.list_(pa.int32()),
    "loss_mask": pa.list_(pa.bool_()),
}
CHECKSUMS = ("checksums", "optional_checksums")
"""Columns of a part: of each row the CRC-32 of its required cells, and of its optional ones."""

CELLS = "cells/"
"""`cells/NAME` of the index: −1 without a cell in column NAME, else the bytes of a binary cell."""

_FLOATS = pa.list_(pa.float32())
OPTIONAL_TYPES: dict[str, Any] = {
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "token_advantages": _FLOATS,  # the per-token form of `advantage`
    **dict.fromkeys(PER_TOKEN_FIELDS, _FLOATS),
}


def column_type(name: str) -> Any:
    """Arrow type of a column of a part."""
    return REQUIRED_TYPES.get(name) or OPTIONAL_TYPES.get(name) or pa.binary()


def is_extra(name: str) -> bool:
    """Whether a column holds arrays or blobs that only the user's code reads."""
    return name.partition("/")[0] in EXTRA_KINDS


def optional_cells(sample: Sample) -> dict[str, Any]:
    """Column → cell of what the sample has beyond tokens, mask and ids."""
    per_token = isinstance(sample.advantage, np.ndarray)
    cells: dict[str, Any] = {
        "reward": sample.reward,
        "token_advantages" if per_token else "advantage": sample.advantage,
        **{name: getattr(sample, name) for name in PER_TOKEN_FIELDS},
    }
    for kind in ("token_arrays", "response_arrays"):
        cells |= {f"{kind}/{name}": npy_bytes(a) for name, a in getattr(sample, kind).items()}
    cells |= {f"blobs/{name}": blob for name, blob in sample.blobs.items()}
    return {name: cell for name, cell in cells.items() if cell is not None}


def optional_names(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Optional columns that some row has a cell in, in the order in which parts store them.

    Raises:
        RolloutDataError: They are more than `MAX_COLUMNS`.
    """
    present = {name for row in cells for name in row}
    if len(present) > MAX_COLUMNS:
        raise RolloutDataError(
            f"samples: {len(present)} optional fields, arrays and blobs by name; a batch has at "
            f"most {MAX_COLUMNS}"
        )
    own = [name for name in OPTIONAL_TYPES if name in present]
    return own + sorted(name for name in present if is_extra(name))


def cell_sizes(cells: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """The `CELLS` columns of the index, of the optional cells of each row."""
    return {
        f"{CELLS}{name}": [
            -1 if (cell := own.get(name)) is None else len(cell) if is_extra(name) else 0
            for own in cells
        ]
        for name in optional_names(cells)
    }


def required_cells(sample: Sample, row: int) -> dict[str, Any]:
    """Column → cell of what every sample has."""
    ids = {name: value(sample) for name, value in IDS.items()}
    return {"row": row, **ids, "tokens": sample.tokens, "loss_mask": sample.loss_mask}


def sample_from_cells(cells: dict[str, Any]) -> Sample:
    """Inverse of the cells of a sample; absent ones may be left out or None.

    Raises:
        ValueError: The cells make no sample.
    """
    cells = {name: cell for name, cell in cells.items() if cell is not None and name != "row"}
    if "token_advantages" in cells:
        cells["advantage"] = cells.pop("token_advantages")
    extras: dict[str, Any] = {kind: {} for kind in EXTRA_KINDS}
    for column in [name for name in cells if is_extra(name)]:
        kind, _, name = column.partition("/")
        cell = cells.pop(column)
        extras[kind][name] = bytes(cell) if kind == "blobs" else array_of_npy(cell)
    return Sample(**cells, **extras)


def cell_bytes(name: str, cell: Any) -> bytes:
    """What a checksum of a cell is taken over: its values as stored, a mask's as bytes."""
    if isinstance(cell, (int, float)):
        return struct.pack("<q" if isinstance(cell, int) else "<d", cell)
    if isinstance(cell, bytes):
        return cell
    stored = np.uint8 if name == "loss_mask" else column_type(name).value_type.to_pandas_dtype()
    return np.ascontiguousarray(cell, stored).tobytes()


def checksum(name: str, cell: Any) -> int:
    """CRC-32 of a cell; 0 of none."""
    return 0 if cell is None else zlib.crc32(cell_bytes(name, cell))


def checksums(cells: Mapping[str, Any], names: Iterable[str]) -> bytes:
    """Checksums of these cells of a row, four bytes each."""
    return b"".join(struct.pack("<I", checksum(name, cells.get(name))) for name in names)


def arrow_table(columns: Mapping[str, Sequence[Any]], types: Mapping[str, Any]) -> Any:
    """A table of these columns."""
    schema = pa.schema([(name, types[name]) for name in columns])
    arrays = [_arrow_column(cells, types[name]) for name, cells in columns.items()]
    return pa.table(arrays, schema=schema)


def columns_of(cells: Iterable[dict[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Cells of each sample, by column; None where a sample has none."""
    rows = list(cells)
    return {name: [row.get(name) for row in rows] for name in names}


def _arrow_column(cells: Sequence[Any], arrow_type: Any) -> Any:
    if not pa.types.is_list(arrow_type):
        return pa.array(cells, arrow_type)
    lists = [() if cell is None else cell for cell in cells]
    offsets = np.concatenate([[0], np.cumsum([len(cell) for cell in lists])])
    values = np.concatenate(lists).astype(arrow_type.value_type.to_pandas_dtype())
    absent = pa.array([cell is None for cell in cells])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), mask=absent)

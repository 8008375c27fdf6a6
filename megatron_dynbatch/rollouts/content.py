"""What a batch holds, as one short text: made from the checksums of its rows, in row order.

Invariants (asserted by the tests): equal for the same samples wherever and in whatever parts they
are written; different if a cell, the order of rows or the columns differ. Every part keeps these
checksums, so the text can be found again from the files of any batch of this format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.columns import (
    CELLS,
    CHECKSUMS,
    CONTENT_KEY,
    REQUIRED_TYPES,
    cell_sizes,
    checksums,
    optional_cells,
    required_cells,
)
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.parquet_file import Stored, open_parquet
from megatron_dynbatch.rollouts.parquet_index import read_places
from megatron_dynbatch.rollouts.parquet_rows import check_layout
from megatron_dynbatch.rollouts.sample import Sample

_KIND = "rows:"


def are_comparable(one: str, other: str) -> bool:
    """Whether two stamps were made the same way: only then do they tell what differs."""
    kind = one.partition(":")[0]
    return kind != "" and kind == other.partition(":")[0]


def content_of_samples(samples: Sequence[Sample]) -> str:
    """The stamp of a batch of these samples, in row order."""
    optional = [optional_cells(sample) for sample in samples]
    sizes = {name.removeprefix(CELLS): column for name, column in cell_sizes(optional).items()}
    required = [checksums(required_cells(s, row), REQUIRED_TYPES) for row, s in enumerate(samples)]
    return _stamp(
        _words(required, len(REQUIRED_TYPES)),
        _words([checksums(cells, sizes) for cells in optional], len(sizes)),
        {name: np.array(column, np.int32) for name, column in sizes.items()},
    )


def stored_content(index: Stored) -> str | None:
    """The stamp that was written with an index; None in those of an older version.

    Raises:
        FileNotFoundError: There is no such file.
        RolloutDataError: The file is damaged.
    """
    with open_parquet(index) as file:
        found = (file.parquet.metadata.metadata or {}).get(CONTENT_KEY.encode())
    return None if found is None else found.decode("ascii", "replace")


def content_of_files(index: Stored, part: Callable[[int], Stored]) -> str:
    """The stamp as the checksums in the parts say it; no cell is read.

    Args:
        index: Of the batch.
        part: Part number → file.

    Raises:
        FileNotFoundError: A file is not there.
        RolloutDataError: A file is damaged, or of another batch.
    """
    places = read_places(index)
    names = list(places.sizes)
    required = np.zeros((len(places.parts), len(REQUIRED_TYPES)), np.uint32)
    optional = np.zeros((len(places.parts), len(names)), np.uint32)
    for number in np.unique(places.parts).tolist():
        source = part(number)
        rows = np.flatnonzero(places.parts == number)
        rows = rows[np.argsort(places.positions[rows])]
        with open_parquet(source) as file:
            there = [n for n in file.parquet.schema_arrow.names if n not in CHECKSUMS]
            check_layout(source, file.row_groups, CHECKSUMS)
            table = file.parquet.read(columns=list(CHECKSUMS), use_threads=False)
        own = [name for name in there if name not in REQUIRED_TYPES]
        if len(table) != len(rows) or not set(own) <= set(names):
            raise _other_batch(source)
        required[rows] = _column(source, table, CHECKSUMS[0], required.shape[1])
        if own:
            at = [names.index(name) for name in own]
            optional[np.ix_(rows, at)] = _column(source, table, CHECKSUMS[1], len(own))
    return _stamp(required, optional, places.sizes)


def _stamp(
    required: NDArray[np.uint32],
    optional: NDArray[np.uint32],
    sizes: dict[str, NDArray[Any]],
) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([list(REQUIRED_TYPES), list(sizes), len(required)]).encode())
    digest.update(required.astype("<u4").tobytes())
    digest.update(optional.astype("<u4").tobytes())
    # The checksum of an empty cell is that of none: sizes tell them apart.
    for column in sizes.values():
        digest.update(column.astype("<i4").tobytes())
    return _KIND + digest.hexdigest()


def _words(rows: Sequence[bytes], width: int) -> NDArray[np.uint32]:
    return np.frombuffer(b"".join(rows), "<u4").reshape(len(rows), width)


def _column(source: Stored, table: Any, name: str, width: int) -> NDArray[np.uint32]:
    cells = table.column(name).to_pylist() if name in table.column_names else []
    if len(cells) != len(table) or any(cell is None or len(cell) != 4 * width for cell in cells):
        raise _other_batch(source)
    return _words(cells, width)


def _other_batch(source: Stored) -> RolloutDataError:
    return RolloutDataError(
        f"{source}: its rows, columns and checksums are not those that the index tells of; index "
        "and part are of different batches: write the batch again"
    )

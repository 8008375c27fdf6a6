"""Files of a batch rewritten with all checksums right: what an error must be found in spite of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_dynbatch.rollouts.columns import CHECKSUMS, REQUIRED_TYPES, checksums
from megatron_dynbatch.rollouts.manifest import write_manifest

INDEX, PART = "index.parquet", "part-00000.parquet"
PLAIN = {"compression": "none", "use_dictionary": False, "write_statistics": False}

Change = Callable[[Any], Any]


def write_plain(table: Any, path: Path, **options: Any) -> None:
    """A table as `write_part` would leave it."""
    pq.write_table(table, path, store_schema=False, **{**PLAIN, **options})


def with_checksums(table: Any) -> Any:
    """The table of a part with the checksums of its cells."""
    own = [name for name in table.column_names if name not in CHECKSUMS]
    rows = table.select(own).to_pylist()
    for column, is_required in zip(CHECKSUMS, (True, False), strict=True):
        names = [name for name in own if (name in REQUIRED_TYPES) == is_required]
        if column in table.column_names:
            sums = pa.array([checksums(row, names) for row in rows], pa.binary(4 * len(names)))
            place = table.schema.get_field_index(column)
            table = table.set_column(place, column, sums)
    return table


def forge(batch: Path, name: str, change: Change, *, sums: bool = True, **options: Any) -> None:
    """A file of a batch with another table in it, and a manifest that fits.

    Args:
        batch: The folder of the batch.
        name: `INDEX` or a part.
        change: Old table → new one.
        sums: Whether the checksums of a part are made to fit.
        options: Of `pyarrow.parquet.write_table`.
    """
    path = batch / name
    table = change(pq.read_table(path))
    write_plain(table if name == INDEX or not sums else with_checksums(table), path, **options)
    write_manifest(batch, "stamp")


def forge_bytes(batch: Path, name: str, content: bytes) -> None:
    """A Parquet file of a batch with this content, and a manifest that fits."""
    (batch / name).write_bytes(content)
    write_manifest(batch, "stamp")


def replaced(column: str, values: Any, name: str | None = None) -> Change:
    """A column replaced, and perhaps renamed."""

    def change(table: Any) -> Any:
        place = table.schema.get_field_index(column)
        return table.set_column(place, name or column, values)

    return change

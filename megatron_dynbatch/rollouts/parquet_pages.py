"""What the page headers of a Parquet column claim, looked at before a page is decompressed.

The footer tells how large a column is, but pyarrow takes memory by each page's own header, which
nothing else vouches for.
"""

from __future__ import annotations

from typing import Any

from megatron_dynbatch.rollouts.parquet_footer import Chunk
from megatron_dynbatch.rollouts.thrift_compact import read_struct

_HEADER_BYTES = 256  # ours have some 40; statistics, which could be long, are never written
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_HEADER_OF_KIND = {_DATA_PAGE: 5, _DICTIONARY_PAGE: 7, _DATA_PAGE_V2: 8}


def check_pages(raw: Any, chunk: Chunk, num_rows: int, most_bytes: int) -> None:
    """Checks that a flat column of so many rows has no page that claims more.

    Args:
        raw: The file, an open `pyarrow.NativeFile`.
        chunk: The column; lies inside the file.
        num_rows: Rows of the row group.
        most_bytes: What a page may take in memory.

    Raises:
        ValueError: A page claims more values or bytes, or is none.
    """
    start, num_values = chunk.start, 0
    while start < chunk.end:
        fields, used = read_struct(raw.read_at(min(_HEADER_BYTES, chunk.end - start), start))
        kind, size, stored = (fields.get(number, -1) for number in (1, 2, 3))
        own = fields.get(_HEADER_OF_KIND.get(kind, -1))
        count = own.get(1, -1) if isinstance(own, dict) else -1
        if not all(type(n) is int and n >= 0 for n in (size, stored, count)):
            raise ValueError(f"the page header at byte {start} is damaged")
        if size > most_bytes or count > num_rows:
            raise ValueError(
                f"a page at byte {start} claims {count} values in {size} bytes, for {num_rows} rows"
            )
        num_values += 0 if kind == _DICTIONARY_PAGE else count
        start += used + stored
    if start != chunk.end or num_values != num_rows:
        raise ValueError(f"the pages of {chunk.name} have {num_values} of {num_rows} rows")

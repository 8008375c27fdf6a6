"""Footers and page headers, read here, say what pyarrow says; forged ones are refused."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dynbatch.rollouts.parquet_footer import read_footer
from megatron_dynbatch.rollouts.parquet_pages import check_pages
from megatron_dynbatch.rollouts.thrift_compact import read_struct


def stored(table: Any, **options: Any) -> tuple[bytes, bytes]:
    """What stands before the footer, and the footer."""
    sink = io.BytesIO()
    pq.write_table(table, sink, store_schema=False, **options)
    content = sink.getvalue()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    return content[:start], content[start:-8]


TABLE = pa.table(
    {
        "a": [1, 2, 3, 4],
        "b": [[1.5], [], None, [2.0, 3.0]],
        "c": [b"x", None, b"yy", b""],
        "d": [{"e": 1, "f": "t"}] * 4,
    }
)


@pytest.mark.parametrize("compression", ["none", "zstd", "snappy", "gzip", "brotli", "lz4"])
@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"row_group_size": 3}])
def test_a_footer_says_what_pyarrow_reads(compression: str, options: dict[str, Any]) -> None:
    before, footer = stored(TABLE, compression=compression, **options)
    length = len(footer).to_bytes(4, "little")
    metadata = pq.read_metadata(pa.BufferReader(before + footer + length + b"PAR1"))
    groups = read_footer(footer, len(before))
    assert len(groups) == metadata.num_row_groups
    for number, group in enumerate(groups):
        other = metadata.row_group(number)
        assert (group.num_rows, len(group.chunks)) == (other.num_rows, other.num_columns)
        for place, chunk in enumerate(group.chunks):
            wanted = other.column(place)
            assert chunk.name == wanted.path_in_schema.partition(".")[0]
            assert chunk.codec.removesuffix("_RAW") == wanted.compression
            assert chunk.encodings == tuple(wanted.encodings)
            assert chunk.has_dictionary == wanted.has_dictionary_page
            first = wanted.dictionary_page_offset if chunk.has_dictionary else None
            assert chunk.start == (first or wanted.data_page_offset)
            assert chunk.end - chunk.start == wanted.total_compressed_size


def test_what_lies_outside_the_file_or_lies_twice_is_refused() -> None:
    before, footer = stored(TABLE)
    read_footer(footer, len(before))
    with pytest.raises(ValueError, match="is said to lie from byte"):
        read_footer(footer, len(before) - 1)
    for end in range(0, len(footer) - 1, 7):
        with pytest.raises(ValueError):
            read_footer(footer[:end], len(before))


def test_pages_have_the_rows_of_their_group_and_no_more() -> None:
    table = pa.table({"a": list(range(1000))})
    before, footer = stored(table, compression="zstd")
    ((group,), raw) = read_footer(footer, len(before)), pa.BufferReader(before)
    check_pages(raw, group.chunks[0], 1000, 8000 + 100)
    with pytest.raises(ValueError, match="claims 1000 values in 8000 bytes, for 999 rows"):
        check_pages(raw, group.chunks[0], 999, 8100)
    with pytest.raises(ValueError, match="values in 8000 bytes"):
        check_pages(raw, group.chunks[0], 1000, 7999)
    with pytest.raises(ValueError, match="have 1000 of 1001 rows"):
        check_pages(raw, group.chunks[0], 1001, 8100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the end is missing"),
        (b"\x18\xff\xff\xff\x7f", "a text is longer than what there is"),
        (b"\x19\xf5\xff\xff\xff\x7f", "entries is longer than what there is"),
        (b"\x1c" * 100, "nested too deeply"),
        (b"\x16" + b"\xff" * 20, "more than 64 bits"),
        (b"\x1b\x00", "there is no type 11"),
    ],
)
def test_structs_that_are_none(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_struct(content)

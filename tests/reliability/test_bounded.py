"""Memory is taken for what is there, not for what a file claims; limits hold to the last unit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from megatron_dynbatch.rollouts import RolloutBatch, RolloutDataError, RolloutDirectory, Sample
from megatron_dynbatch.rollouts.index import SampleIndex
from tests.pool import ROOT
from tests.rollouts.forging import INDEX, PART, forge, forge_bytes, replaced, write_plain

LARGEST = 64 << 20
SHARE = 4
MAX_TOKENS, MAX_ROWS = 1 << 24, 1 << 19  # as docs/rollouts.md says


def peaks(*paths: Path) -> list[tuple[int, str | None]]:
    """Bytes that reading row 0 of each directory took at most, and how that ended."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.reliability.peak", *map(str, paths)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [tuple(json.loads(line)) for line in run.stdout.splitlines()]


def small(path: Path, num_samples: int = 9) -> Path:
    """A batch of small samples; returns its folder."""
    RolloutDirectory(path).write([Sample([5, 6, 7], 2, rollout_id=n) for n in range(num_samples)])
    return path / "batch-00000000"


@pytest.mark.parametrize("num_neighbours", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_large_row_takes_four_times_its_bytes(tmp_path: Path, num_neighbours: int) -> None:
    length = 1 << 21
    rng = np.random.default_rng(0)
    values = rng.normal(size=length - 1).astype(np.float32)
    per_token = {"log_probs": values, "rollout_log_probs": values, "values": values}
    tokens = rng.integers(0, 1000, length)
    large = Sample(tokens, length - 1, token_arrays={"experts": tokens[:, None]}, **per_token)
    RolloutDirectory(tmp_path).write([large] * (1 + num_neighbours))
    num_bytes = 4 * length + length // 8 + 3 * 4 * (length - 1) + 8 * length
    ((took, error),) = peaks(tmp_path)
    assert error is None
    assert num_bytes < took < SHARE * num_bytes + LARGEST


def index_of(num_rows: int) -> Any:
    """The index of so many samples of 100 tokens, all in part 0."""
    rows = np.arange(num_rows, dtype=np.int32)
    constant = {
        "total_length": 100, "response_length": 50, "mask_sum": 50,
        "group_id": -1, "policy_version": 0, "max_token_id": 7,
    }  # fmt: skip
    columns = {name: np.full(num_rows, value, np.int64) for name, value in constant.items()}
    columns |= {"rollout_id": rows.astype(np.int64), "part": rows * 0, "part_row": rows}
    names = ("advantage", "reward", "log_probs", "ref_log_probs", "rollout_log_probs", "values")
    columns |= {f"cells/{name}": rows * 0 for name in names}
    return pa.table(columns)


def write_index(path: Path, num_rows: int, **options: Any) -> None:
    repeating = ["part", *(name for name in index_of(1).column_names if "/" in name)]
    encodings = {
        name: "DELTA_BINARY_PACKED" for name in index_of(1).column_names if name not in repeating
    }
    write_plain(
        index_of(num_rows),
        path,
        **{
            "compression": "zstd",
            "use_dictionary": repeating,
            "column_encoding": encodings,
            "row_group_size": num_rows,
            **options,
        },
    )


def test_the_largest_index_is_read_in_little_memory(tmp_path: Path) -> None:
    sizes = {"in-order": MAX_ROWS, "shuffled": MAX_ROWS, "too-many": MAX_ROWS + 1}
    for name, num_rows in sizes.items():
        batch = small(tmp_path / name)
        write_index(batch / INDEX, num_rows)
        if name == "shuffled":
            places = np.random.default_rng(0).permutation(num_rows).astype(np.int32)
            options = {"compression": "zstd", "row_group_size": num_rows}
            forge(batch, INDEX, replaced("part_row", pa.array(places)), **options)
        forge_bytes(batch, INDEX, (batch / INDEX).read_bytes())
    for name, (took, error) in zip(sizes, peaks(*(tmp_path / name for name in sizes)), strict=True):
        assert error is not None and took < LARGEST, (name, took, error)
        wanted = {"in-order": "the index says 524288", "shuffled": "should be at position"}
        assert wanted.get(name, "524289 rows, 524289 in row groups; at most 524288") in error


def varint(number: int, size: int | None = None) -> bytes:
    """A zigzag varint of Thrift, filled up to a size."""
    left, content = 2 * number, bytearray()
    while left or not content or len(content) < (size or 0):
        content.append(left & 127 | 128)
        left >>= 7
    content[-1] &= 127
    return bytes(content)


@pytest.mark.slow
def test_an_index_page_that_is_larger_than_its_rows_is_not_decompressed(tmp_path: Path) -> None:
    """A footer of 9 rows over pages of 20 million."""
    batch, num_rows = small(tmp_path), 20_000_000
    options = {"use_dictionary": False, "column_encoding": None, "max_rows_per_page": num_rows}
    write_index(batch / INDEX, num_rows, data_page_size=1 << 30, **options)
    content = (batch / INDEX).read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    many = varint(num_rows)
    footer = content[start:].replace(many, varint(9, len(many)))
    assert footer != content[start:] and len(footer) == len(content) - start
    forge_bytes(batch, INDEX, content[:start] + footer)
    ((took, error),) = peaks(tmp_path)
    assert error is not None and "claims 20000000 values in" in error, error
    assert took < LARGEST, took


def _many(table: Any) -> Any:
    return pa.concat_tables([table] * 100_000).combine_chunks()


SMALL_FILES: dict[str, Callable[[Path], None]] = {
    "stored as ZSTD": lambda b: forge(b, PART, lambda t: t, compression="zstd"),
    "RLE_DICTIONARY": lambda b: forge(b, PART, lambda t: t, use_dictionary=True),
    "at most 524288": lambda b: forge(
        b, PART, _many, sums=False, compression="zstd", use_dictionary=True
    ),
    "column tokens is smaller than the index says": lambda b: forge(
        b, INDEX, replaced("total_length", pa.array([1 << 24] * 9))
    ),
    "row 0, column total_length is 1099511627776": lambda b: forge(
        b, INDEX, replaced("total_length", pa.array([1 << 40] * 9))
    ),
}


def test_a_small_file_never_takes_much(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(len(SMALL_FILES))]
    for path, damage in zip(paths, SMALL_FILES.values(), strict=True):
        damage(small(path))
    for wanted, (took, error) in zip(SMALL_FILES, peaks(*paths), strict=True):
        assert error is not None and wanted in error, error
        assert took < LARGEST, (wanted, took)


def test_rows_of_a_batch_and_tokens_of_a_sample_have_a_last_number() -> None:
    ones = np.ones(MAX_ROWS, np.int64)
    SampleIndex(ones, ones, ones, -ones, -ones).check()
    SampleIndex([MAX_TOKENS], [1], [1], [-1], [-1]).check()
    assert Sample(np.zeros(MAX_TOKENS, np.int8), 1).total_length == MAX_TOKENS
    assert Sample([1], MAX_TOKENS).response_length == MAX_TOKENS  # too long for it, says the batch
    with pytest.raises(RolloutDataError, match="at most 16777216 tokens"):
        Sample([1], MAX_TOKENS + 1)
    with pytest.raises(RolloutDataError, match="row 0, loss_mask: response and mask have 16777216"):
        RolloutBatch([Sample([1], MAX_TOKENS)])


def test_a_batch_of_as_many_columns_as_there_may_be_is_read_again(tmp_path: Path) -> None:
    """Under the longest names: the footer that is believed has room for them."""
    blobs = {f"{n:b}".rjust(11, "_").ljust(100, "x"): b"png" for n in range(1024)}
    directory = RolloutDirectory(tmp_path / "rollouts")
    directory.write([Sample([1, 2], 1, blobs=blobs)])
    assert directory.read(0, [0])[0].blobs == blobs
    with pytest.raises(RolloutDataError, match="1025 optional fields"):
        directory.write([Sample([1, 2], 1, blobs={**blobs, "one": b""})])

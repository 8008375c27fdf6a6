"""The stamp of a batch's content: equal wherever the same samples are, else different."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dynbatch.rollouts import (
    PER_TOKEN_FIELDS,
    RolloutDataError,
    RolloutDirectory,
    RolloutQueue,
    Sample,
)
from megatron_dynbatch.rollouts.content import are_comparable, content_of_samples
from megatron_dynbatch.rollouts.manifest import read_manifest, write_manifest
from tests.rollouts.forging import PLAIN
from tests.rollouts.helpers import random_samples

ID_FIELDS = ("rollout_id", "group_id", "policy_version")
ARRAYS = {"token_arrays": "experts", "response_arrays": "scores"}


def other_bit(array: np.ndarray, position: int) -> np.ndarray:
    """One bit of one entry turned."""
    changed = np.array(array)
    raw = changed.reshape(-1).view(np.uint8)
    raw[position % raw.size] ^= 1
    return changed


def changed_cell(sample: Sample, name: str, position: int) -> Sample | None:
    """The sample with another value in one field, None if it has none to change."""
    changed = copy.copy(sample)
    value = getattr(sample, name)
    if name in ID_FIELDS:
        new: Any = 77 if value is None else value + 1
    elif name in ARRAYS:
        array = value[ARRAYS[name]]
        new = {ARRAYS[name]: other_bit(array, position)} if array.size else None
    elif name == "blobs":
        new = {"image": value["image"] + b"\0"} if value else {"image": b""}
    elif isinstance(value, np.ndarray):
        new = other_entry(name, value, position) if value.size else None
    else:
        new = 0.25 if value is None else value + 0.125
    if new is None:
        return None
    object.__setattr__(changed, name, new)
    return changed


def other_entry(name: str, value: np.ndarray, position: int) -> np.ndarray:
    """Another token, mask entry or number at one place."""
    changed = np.array(value)
    place = position % value.size
    if name == "loss_mask":
        changed[place] = 1 - changed[place]
    elif name == "tokens":
        changed[place] += 1
    else:
        changed[place] = 0.75 if changed[place] != 0.75 else 0.5
    return changed


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 50),
    count=st.integers(1, 8),
    row=st.integers(0, 7),
    name=st.sampled_from(
        ["tokens", "loss_mask", "reward", "advantage", "blobs", *ID_FIELDS, *PER_TOKEN_FIELDS]
        + list(ARRAYS)
    ),
    position=st.integers(0, 1000),
)
def test_any_changed_cell_changes_it(
    seed: int, count: int, row: int, name: str, position: int
) -> None:
    samples = random_samples(count, seed)
    changed = changed_cell(samples[row % count], name, position)
    if changed is not None:
        others = [*samples[: row % count], changed, *samples[row % count + 1 :]]
        assert content_of_samples(samples) != content_of_samples(others)
    assert content_of_samples(samples) == content_of_samples(random_samples(count, seed))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 50), pair=st.sets(st.integers(0, 5), min_size=2, max_size=2))
def test_swapped_and_missing_rows_change_it(seed: int, pair: set[int]) -> None:
    samples = random_samples(6, seed)
    one, other = pair
    swapped = list(samples)
    swapped[one], swapped[other] = samples[other], samples[one]
    assert content_of_samples(swapped) != content_of_samples(samples)
    assert content_of_samples(samples[:-1]) != content_of_samples(samples)
    assert content_of_samples([*samples, samples[0]]) != content_of_samples(samples)


@pytest.mark.parametrize("name", ["reward", *PER_TOKEN_FIELDS])
def test_a_dropped_column_changes_it(name: str) -> None:
    samples, without = random_samples(6, 0), random_samples(6, 0)
    for sample in without:
        object.__setattr__(sample, name, None)
    assert content_of_samples(without) != content_of_samples(samples)


def test_an_empty_cell_is_not_an_absent_one() -> None:
    absent, empty = Sample([1, 2], 0), Sample([1, 2], 0, values=[], blobs={"a": b""})
    assert zlib.crc32(b"") == 0
    only_values, only_blob = Sample([1, 2], 0, values=[]), Sample([1, 2], 0, blobs={"a": b""})
    alone = [content_of_samples([s, empty]) for s in (absent, empty, only_values, only_blob)]
    assert len(set(alone)) == 4


def divisions(count: int, seed: int) -> list[list[int]]:
    """Some rows in some parts; the rest is left to the writer."""
    draw = random.Random(seed)
    rows = draw.sample(range(count), draw.randint(0, count))
    cut = draw.randint(0, len(rows))
    return [part for part in (rows[:cut], rows[cut:]) if part]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 1000), count=st.integers(1, 9))
def test_transports_and_parts_do_not_matter(tmp_path: Path, seed: int, count: int) -> None:
    samples = random_samples(count, seed)
    queue = RolloutQueue()
    queue.write(samples)
    directory = RolloutDirectory(tmp_path / str(random.random()))
    for division in (None, divisions(count, seed), divisions(count, seed + 1)):
        batch = directory.write(samples, parts=division)
        assert directory.content_stamp(batch) == queue.content_stamp(0)
        assert directory.content_stamp(batch, verify=True) == queue.content_stamp(0)
    again = RolloutQueue()
    again.write(directory.read(batch, range(count)))
    assert again.content_stamp(0) == queue.content_stamp(0)
    assert directory.stamp(0) != directory.stamp(1)  # unique all the same


def crc(content: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(content))


def test_it_is_what_it_is_said_to_be() -> None:
    """The definition once more, in plain Python."""
    samples = [
        Sample([5, 6, 7], loss_mask=[1, 0], rollout_id=4, reward=1.5, blobs={"image": b"abc"}),
        Sample([8, 9], 1, group_id=2, values=[0.5]),
    ]
    columns = ["row", "rollout_id", "group_id", "policy_version", "tokens", "loss_mask"]
    optional = ["reward", "values", "blobs/image"]
    required = b""
    for row, (rollout, group, tokens, mask) in enumerate(
        [(4, -1, [5, 6, 7], [1, 0]), (-1, 2, [8, 9], [1])]
    ):
        required += b"".join(crc(struct.pack("<q", v)) for v in (row, rollout, group, -1))
        required += crc(struct.pack(f"<{len(tokens)}i", *tokens)) + crc(bytes(mask))
    none = struct.pack("<I", 0)
    cells = crc(struct.pack("<d", 1.5)) + none + crc(b"abc")
    cells += none + crc(struct.pack("<f", 0.5)) + none
    sizes = struct.pack("<6i", 0, -1, -1, 0, 3, -1)
    text = json.dumps([columns, optional, 2]).encode()
    expected = hashlib.blake2b(text + required + cells + sizes, digest_size=16).hexdigest()
    assert content_of_samples(samples) == f"rows:{expected}"


def test_stamps_of_other_kinds_are_not_compared() -> None:
    assert are_comparable("rows:a", "rows:b") and are_comparable("rows:a", "rows:a")
    for one, other in (("rows:a", "files:a"), ("", "rows:a"), ("", ""), ("rows:a", "")):
        assert not are_comparable(one, other)


def rewrite(part: Path, change: Any) -> None:
    """The same file with another table, and a manifest that fits."""
    stamp, table = pq.read_metadata(part).metadata, change(pq.read_table(part))
    with pq.ParquetWriter(part, table.schema, store_schema=False, **PLAIN) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(stamp)
    write_manifest(part.parent, read_manifest(part.parent).stamp)


def with_column(table: Any, name: str, values: Sequence[Any], arrow_type: Any) -> Any:
    column = pa.array(values, arrow_type)
    return table.set_column(table.schema.get_field_index(name), name, column)


def test_parts_that_were_exchanged_below_their_index_are_noticed(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "r")
    directory.write([Sample([1, 2, 3], 1, reward=1.0), Sample([4, 5, 6], 1, reward=2.0)])
    directory.write([Sample([1, 2, 3], 1, reward=1.0), Sample([4, 5, 7], 1, reward=2.0)])
    first, second = (tmp_path / "r" / f"batch-0000000{n}" for n in (0, 1))
    was = directory.content_stamp(0)
    (first / "part-00000.parquet").write_bytes((second / "part-00000.parquet").read_bytes())
    write_manifest(first, directory.stamp(0))
    assert directory.content_stamp(0) == was
    with pytest.raises(RolloutDataError, match="its parts were changed after it was written"):
        directory.content_stamp(0, verify=True)


def test_rows_that_are_missing_below_their_index_are_noticed(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "r")
    directory.write([Sample([1, 2, 3], 1, reward=1.0), Sample([4, 5, 6], 1)])
    part = tmp_path / "r" / "batch-00000000" / "part-00000.parquet"
    rewrite(part, lambda table: table)
    directory.content_stamp(0, verify=True)
    size = 4 * 6 - 4
    changes = [
        lambda table: table.slice(0, 1),
        lambda table: with_column(table, "checksums", [b"a" * size, b"b" * size], pa.binary(size)),
        lambda table: table.drop_columns(["checksums"]),
        lambda table: table.append_column("values", table.column("reward")),
    ]
    whole = part.read_bytes()
    for change in changes:
        part.write_bytes(whole)
        rewrite(part, change)
        with pytest.raises(RolloutDataError, match="are not those that the index tells of"):
            directory.content_stamp(0, verify=True)


def test_the_manifest_says_nothing_of_it(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "r")
    directory.write(random_samples(3, 0))
    was = directory.content_stamp(0)
    path = tmp_path / "r" / "batch-00000000" / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "stamp": "other"}))
    assert directory.content_stamp(0) == directory.content_stamp(0, verify=True) == was
    path.write_text(json.dumps({**values, "footers": {n: 1 for n in values["footers"]}}))
    with pytest.raises(RolloutDataError, match="not the file that was written with its batch"):
        directory.content_stamp(0)

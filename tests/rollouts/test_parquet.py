"""One batch as files: round trip, little read for few rows, and every kind of damage named."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.rollouts import (
    RolloutDataError,
    Sample,
    SampleIndex,
    parquet_index,
    parquet_read,
    parquet_write,
    validate_samples,
)
from megatron_dynbatch.rollouts.parquet_write import Parts
from tests.rollouts.forging import write_plain
from tests.rollouts.helpers import assert_same_samples, golden_samples, random_samples


def index_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.index")


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """A part that holds the samples in row order, and its index."""
    with open(path, "wb") as part, open(index_path(path), "wb") as index:
        parquet_write.write_part(part, samples, range(len(samples)))
        parquet_write.write_index(index, samples, Parts.of(len(samples), None).places)


def read_index(path: Path, vocab_size: int | None = None) -> SampleIndex:
    return parquet_index.read_index(index_path(path), vocab_size)


def read_rows(
    path: Path,
    rows: Sequence[int],
    fields: Collection[str] | None = None,
    vocab_size: int | None = None,
) -> list[Sample]:
    cells = parquet_index.read_places(index_path(path)).cells(0)
    found = parquet_read.read_part([path], {row: row for row in rows}, cells, fields, vocab_size)
    return [found[row] for row in rows]


def bytes_read(action: Callable[[], object]) -> int:
    """Bytes that the process asks the kernel for during `action`."""

    def total() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    own = -total() + total()  # what looking at the counter costs
    before = total()
    action()
    return total() - before - own


def test_round_trip_over_many_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_write, "ROW_GROUP_ROWS", 32)
    samples = random_samples(150, seed=0)
    write_samples(tmp_path / "f", samples)
    assert pq.ParquetFile(tmp_path / "f").num_row_groups == 5
    assert_same_samples(read_rows(tmp_path / "f", range(150)), samples)
    index, wanted = read_index(tmp_path / "f", vocab_size=1000), SampleIndex.from_samples(samples)
    for name in ("total_lengths", "response_lengths", "mask_sums", "rollout_ids", "group_ids"):
        np.testing.assert_array_equal(getattr(index, name), getattr(wanted, name), strict=True)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.lists(st.integers(0, 69), max_size=30))
def test_rows_come_in_the_order_asked(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rows: list[int]
) -> None:
    samples = random_samples(70, seed)
    path = tmp_path_factory.mktemp("rows") / "f"
    write_samples(path, samples)
    assert_same_samples(read_rows(path, rows), [samples[row] for row in rows])


def test_columns_that_no_sample_has_are_not_stored(tmp_path: Path) -> None:
    write_samples(tmp_path / "f", golden_samples())
    names = pq.read_schema(tmp_path / "f").names
    assert "values" in names
    assert not {"reward", "advantage", "token_advantages", "log_probs"} & set(names)


def test_only_the_fields_asked_for(tmp_path: Path) -> None:
    samples = random_samples(10, seed=3)
    write_samples(tmp_path / "f", samples)
    sample = read_rows(tmp_path / "f", [0], fields=["advantage", "values"])[0]
    assert isinstance(sample.advantage, np.ndarray) and sample.values is not None
    assert sample.log_probs is None and sample.reward is None
    assert read_rows(tmp_path / "f", [1], fields=[])[0].advantage is None
    with pytest.raises(ValueError, match="no optional field .*'logprobs'"):
        read_rows(tmp_path / "f", [0], fields=["logprobs"])


def test_row_groups_are_bounded_by_bytes_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_write, "ROW_GROUP_ROWS", 32)
    monkeypatch.setattr(parquet_write, "ROW_GROUP_BYTES", 65_536)
    sizes = [60_000, 5_536, 1, 200_000, 10] + [1] * 40
    groups = parquet_write._row_groups(sizes)
    assert [(g.start, g.stop) for g in groups] == [(0, 2), (2, 3), (3, 4), (4, 36), (36, 45)]


def test_few_rows_are_few_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 150_000, 2000), 1000) for _ in range(640)]
    path = tmp_path / "f"
    write_samples(path, samples)
    size, row, footers = path.stat().st_size, 4 * 2000 + 1000 / 8, 8_000
    cells = parquet_index.read_places(index_path(path)).cells(0)

    def read(*rows: int) -> object:
        return parquet_read.read_part([path], {row: row for row in rows}, cells)

    read(0)  # imports and caches out of the way
    assert bytes_read(lambda: read(*range(640))) > 0.9 * size
    assert bytes_read(lambda: read(320, 322)) < 1.1 * 2 * row + footers
    assert bytes_read(lambda: read_index(path)) < footers
    assert bytes_read(lambda: read()) < footers


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({"compression": "zstd", "use_dictionary": False}, "ZSTD"),
        ({"compression": "none", "use_dictionary": True}, "RLE_DICTIONARY"),
        ({"compression": "none", "use_dictionary": False, "column_encoding": {
            "group_id": "DELTA_BINARY_PACKED"}}, "DELTA_BINARY_PACKED"),
        ({"compression": "none", "use_dictionary": False, "column_encoding": {
            "reward": "BYTE_STREAM_SPLIT"}}, "BYTE_STREAM_SPLIT"),
    ],
)  # fmt: skip
def test_parts_are_plain_and_uncompressed_or_refused(
    tmp_path: Path, options: dict[str, Any], stored: str
) -> None:
    """Where a row is follows from that."""
    path = tmp_path / "f"
    write_samples(path, random_samples(60, seed=2))
    pq.write_table(pq.read_table(path), path, store_schema=False, **options)
    with pytest.raises(RolloutDataError, match=f"stored as .*{stored}.*, not uncompressed and pl"):
        read_rows(path, [40, 2])


def test_no_such_row(tmp_path: Path) -> None:
    write_samples(tmp_path / "f", golden_samples())
    for row in (4, -1):
        with pytest.raises(ValueError, match=f"no row {row}; the batch has rows 0 to 3"):
            parquet_index.read_places(index_path(tmp_path / "f")).by_part([0, row])
    with pytest.raises(RolloutDataError, match="row 4 should be at position 4 of 4"):
        read_rows(tmp_path / "f", [4])


def test_vocabulary_is_checked_without_reading_tokens(tmp_path: Path) -> None:
    write_samples(tmp_path / "f", golden_samples())  # largest ids 6, 15, 23, 32
    with pytest.raises(RolloutDataError, match=r"row 2, tokens: id 23 .* size 20 \(2 such rows\)"):
        read_index(tmp_path / "f", vocab_size=20)
    with pytest.raises(RolloutDataError, match="row 3 .*, tokens: id 30 at position 0"):
        read_rows(tmp_path / "f", [0, 3], vocab_size=20)
    read_rows(tmp_path / "f", [0, 1], vocab_size=20)


def test_a_missing_file_stays_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_index(tmp_path / "f")
    with pytest.raises(FileNotFoundError):
        read_rows(tmp_path / "f", [0])


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Replaces the columns of a file by what `change` makes of them."""
    table = pq.read_table(path)
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    change(columns)
    write_plain(pa.table(columns), path)


def int_lists(values: list[list[int | None] | None]) -> Any:
    return pa.array(values, pa.list_(pa.int32()))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("mask_sum", None, "column mask_sum is missing"),
        ("rollout_id", pa.array(["a"] * 4), "column rollout_id has type string, not int64"),
        ("group_id", pa.array([1, None, 2, 3]), "row 1, column group_id is empty"),
        ("total_length", pa.array([7, 6, 0, 3]), r"rows 2 \(rollout 1\) has no tokens"),
        ("response_length", pa.array([9, 1, 2, 2]), r"rows 0 \(rollout 0\) has more response"),
        ("policy_version", pa.array([0, 0, -2, 0]), r"rows 2 \(rollout 1\) has a negative policy"),
    ],
)
def test_wrong_columns_of_an_index_are_named(
    tmp_path: Path, column: str, values: Any, message: str
) -> None:
    path = tmp_path / "f"
    write_samples(path, golden_samples())
    change = {column: values}
    rewrite(index_path(path), lambda c: c.pop(column) if values is None else c.update(change))
    with pytest.raises(RolloutDataError, match=message) as caught:
        read_index(path)
    assert str(path) in str(caught.value)


def test_sizes_of_cells_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_samples(path, golden_samples())
    rewrite(index_path(path), lambda c: c.update({"cells/values": pa.array(["a"] * 4)}))
    with pytest.raises(RolloutDataError, match="column cells/values has type string, not int32"):
        parquet_index.read_places(index_path(path))


def test_an_index_without_the_sizes_of_a_column_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_samples(path, golden_samples())
    rewrite(index_path(path), lambda c: c.pop("cells/values"))
    with pytest.raises(RolloutDataError, match="how large the cells of column values are"):
        read_rows(path, [0])


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("tokens", None, "column tokens is missing"),
        ("tokens", pa.array([[1.0]] * 4), "column tokens has type list<.*double>, not list"),
        ("values", pa.array([1.0] * 4), "column values has type double, not list"),
        ("tokens", int_lists([[6], [15], [1], [1]]), "column tokens is smaller than the index"),
        ("tokens", int_lists([[6] * 7, [15] * 6, [1] * 4, [1] * 3]), "row 0, column tokens is dam"),
        ("checksums", None, "column checksums is missing"),
        ("checksums", pa.array([b"a"] * 4), "column checksums has type binary, not fixed_size"),
        ("row", pa.array([0, 1, 3, 2]), "row 2, column row is damaged"),
        ("rollout_id", pa.array([0, -9, 1, 2]), "row 1, column rollout_id is damaged"),
    ],
)
def test_wrong_columns_of_a_part_are_named(
    tmp_path: Path, column: str, values: Any, message: str
) -> None:
    path = tmp_path / "f"
    write_samples(path, golden_samples())
    rewrite(path, lambda c: c.pop(column) if values is None else c.update({column: values}))
    with pytest.raises(RolloutDataError, match=message) as caught:
        read_rows(path, range(4))
    assert str(path) in str(caught.value)


def test_row_numbers_are_those_of_the_batch(tmp_path: Path) -> None:
    samples = random_samples(70, seed=5)
    parts = Parts.of(70, [[66, 1], [40]])
    assert [len(rows) for rows in parts.rows] == [2, 1, 67]
    path = tmp_path / "f"
    with open(path, "wb") as file, open(index_path(path), "wb") as index:
        parquet_write.write_part(file, [samples[66], samples[1]], parts.rows[0])
        parquet_write.write_index(index, samples, parts.places)
    cells = parquet_index.read_places(index_path(path)).cells(0)
    found = parquet_read.read_part([path], {1: 1, 66: 0}, cells)
    assert_same_samples([found[1], found[66]], [samples[1], samples[66]])
    rewrite(path, lambda c: c.update({"group_id": pa.array([-5, 0])}))
    with pytest.raises(RolloutDataError, match="row 66, column group_id is damaged"):
        parquet_read.read_part([path], {66: 0}, cells)


@pytest.mark.parametrize("parts", [[[0, 1], [1]], [[4]], [[-1]]])
def test_parts_hold_rows_of_the_batch_once(parts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="is not one of the 4 rows, or is in two places"):
        Parts.of(4, parts)


def test_every_truncation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_samples(path, golden_samples())
    content = path.read_bytes()
    index_content = index_path(path).read_bytes()
    for length in range(0, len(content), 79):
        path.write_bytes(content[:length])
        index_path(path).write_bytes(index_content[:length])
        with pytest.raises(RolloutDataError, match=str(path)):
            read_rows(path, range(4))
        if length < len(index_content):
            with pytest.raises(RolloutDataError, match=str(path)):
                read_index(path)


@pytest.mark.parametrize("step", [1, 2])
def test_flipped_bytes_are_named_or_harmless(
    tmp_path: Path, step: int
) -> None:
    """Checksums find damaged data; what is not found must not change a value."""
    path = tmp_path / "f"
    samples = random_samples(40, seed=7)
    write_samples(path, samples)
    content = path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little")
    rng = np.random.default_rng(0)
    num_named = 0
    wanted = range(0, 40, step)
    for position in rng.integers(4, len(content) - footer - 8, 80):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            found = read_rows(path, wanted)
        except RolloutDataError as error:
            assert str(path) in str(error)
            num_named += 1
        else:
            assert_same_samples(found, [samples[row] for row in wanted])
    assert num_named > (40 if step == 1 else 20)


def test_a_damaged_footer_never_gets_through_as_another_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_samples(path, golden_samples())
    content = path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little")
    rng = np.random.default_rng(1)
    for position in rng.integers(len(content) - footer - 8, len(content), 100):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            read_index(path)
            validate_samples(read_rows(path, range(4)))
        except RolloutDataError as error:
            assert str(path) in str(error)

"""Which samples belong together, against plain dictionaries."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.rollouts import RolloutDataError, SampleIndex
from tests.rollouts.helpers import golden_samples

ABSENT = -1
ids = st.integers(-1, 6)


def make_index(rollout_ids: list[int], group_ids: list[int] | None = None) -> SampleIndex:
    ones = [1] * len(rollout_ids)
    groups = [ABSENT] * len(rollout_ids) if group_ids is None else group_ids
    return SampleIndex(ones, ones, ones, rollout_ids, groups)  # type: ignore[arg-type]


def number_by_first_appearance(keys: list[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def partition(numbers: Any) -> set[frozenset[int]]:
    rows: dict[int, set[int]] = {}
    for row, number in enumerate(numbers):
        rows.setdefault(int(number), set()).add(row)
    return {frozenset(members) for members in rows.values()}


def test_from_samples_of_the_golden_fixture() -> None:
    index = SampleIndex.from_samples(golden_samples())
    assert index.total_lengths.tolist() == [7, 6, 4, 3]
    assert index.response_lengths.tolist() == [4, 1, 2, 2]
    assert index.mask_sums.tolist() == [3, 1, 0, 2]
    assert index.rollout_ids.tolist() == [0, 0, 1, 2]
    assert index.group_ids.tolist() == [-1] * 4
    assert (len(index), index.num_rollouts, index.num_groups) == (4, 3, 3)


def test_absent_ids_are_rollouts_of_their_own() -> None:
    assert make_index([ABSENT] * 3).num_rollouts == 3
    partly = make_index([ABSENT, 0, 0, ABSENT])
    assert partly.num_rollouts == 3
    assert partly.rollout_indices.tolist() == [0, 1, 1, 2]


def test_interleaved_and_large_ids() -> None:
    assert make_index([9, 2**62, 9, 2**62]).rollout_indices.tolist() == [0, 1, 0, 1]


def test_a_rollout_without_group_is_its_own_group() -> None:
    index = make_index([3, 3, 5, ABSENT, 7, 8], [ABSENT, ABSENT, ABSENT, ABSENT, 1, 1])
    assert index.group_indices.tolist() == [0, 0, 1, 2, 3, 3]
    assert index.num_groups == 4


def test_empty_index() -> None:
    index = make_index([])
    assert (len(index), index.num_rollouts, index.num_groups) == (0, 0, 0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(ids, ids), max_size=20))
def test_numbering_against_dictionaries(pairs: list[tuple[int, int]]) -> None:
    rollouts = [("own", row) if r < 0 else ("id", r) for row, (r, _) in enumerate(pairs)]
    groups = [rollouts[row] if g < 0 else ("group", g) for row, (_, g) in enumerate(pairs)]
    index = make_index([r for r, _ in pairs], [g for _, g in pairs])
    assert index.rollout_indices.tolist() == number_by_first_appearance(rollouts)
    assert index.group_indices.tolist() == number_by_first_appearance(groups)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(ids, ids), max_size=6), max_size=4))
def test_concat_never_joins_batches(batches: list[list[tuple[int, int]]]) -> None:
    parts = [make_index([r for r, _ in b], [g for _, g in b]) for b in batches]
    whole = SampleIndex.concat(parts)
    assert len(whole) == sum(len(b) for b in batches)
    for of_index in ("rollout_indices", "group_indices"):
        keys = [(k, n) for k, p in enumerate(parts) for n in getattr(p, of_index).tolist()]
        assert partition(getattr(whole, of_index)) == partition(number_by_first_appearance(keys))


def test_concat_keeps_absent_ids_and_a_single_part() -> None:
    part = make_index([7, ABSENT], [4, ABSENT])
    assert SampleIndex.concat([part]) is part
    both = SampleIndex.concat([part, part])
    assert both.rollout_ids.tolist() == [0, -1, 2, -1]
    assert both.group_ids.tolist() == [0, -1, 2, -1]
    assert both.total_lengths.tolist() == [1, 1, 1, 1]


def test_take_keeps_order_and_ids() -> None:
    index = SampleIndex.from_samples(golden_samples()).take([3, 0])
    assert index.total_lengths.tolist() == [3, 7]
    assert index.rollout_ids.tolist() == [2, 0]
    assert index.rollout_indices.tolist() == [0, 1]
    assert len(index.take([])) == 0


def test_columns_are_read_only_copies() -> None:
    lengths = np.array([4, 5])
    index = SampleIndex(lengths, lengths, lengths, lengths, lengths)
    lengths[0] = 9
    assert index.total_lengths.tolist() == [4, 5]
    with pytest.raises(ValueError, match="read-only"):
        index.total_lengths[0] = 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1, 2], [1], [1], [1], [1]), "differ in length: {'total_lengths': 2"),
        (([1.5], [1], [1], [1], [1]), "total_lengths of a SampleIndex has shape .* float64"),
        (([1], [[1]], [1], [1], [1]), "response_lengths of a SampleIndex has shape"),
    ],
)
def test_wrong_columns(columns: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleIndex(*columns)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0, 5, 0], [0, 1, 0], [0, 1, 0], [7, 8, 9], [-1] * 3), r"0 \(rollout 7\), 2 \(rollout 9"),
        (([3], [4], [1], [0], [0]), "more response tokens than tokens"),
        (([3], [-1], [0], [0], [0]), "negative response length"),
        (([3], [1], [2], [0], [0]), "trains more tokens"),
        (([3], [1], [-1], [0], [0]), "negative number of trained"),
        (([3], [1], [1], [-2], [0]), "negative rollout_id"),
        (([3], [1], [1], [0], [-2]), "negative group_id"),
        (([3, 3], [1, 1], [1, 1], [0, 0], [1, 2]), r"rows 1 \(rollout 0\) has another group_id"),
        (([], [], [], [], []), "f.parquet: no rollouts"),
    ],
)
def test_check_names_rows(columns: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RolloutDataError, match=message):
        SampleIndex(*columns).check("f.parquet")


def test_check_accepts_the_golden_fixture() -> None:
    SampleIndex.from_samples(golden_samples()).check()

"""A pack against a plain walk over its samples, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.geometry import PackLayout, ParallelLayout, Spans

shapes_strategy = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6)


def pack_of(shapes: list[tuple[int, int]], layout: ParallelLayout, width: int | None) -> PackLayout:
    """Samples of (prompt, response) tokens."""
    total = np.array([prompt + response for prompt, response in shapes], dtype=np.int64)
    response = np.array([response for _, response in shapes], dtype=np.int64)
    return PackLayout.of_samples(total, response, layout, width)


@settings(max_examples=60, deadline=None)
@given(shapes_strategy, st.sampled_from([1, 2, 4]), st.integers(0, 40))
def test_every_row_is_where_a_walk_over_the_samples_finds_it(
    shapes: list[tuple[int, int]], cp: int, spare: int
) -> None:
    unit = 2 * cp if cp > 1 else 1
    lengths = [-(-(p + r) // unit) * unit for p, r in shapes]
    spare += not sum(lengths)
    pack = pack_of(shapes, ParallelLayout(cp=cp), sum(lengths) + spare * unit)
    tokens: list[tuple[int, int]] = []
    predictions: list[tuple[int, int]] = []
    rows: list[tuple[int, int]] = []
    for sample, ((prompt, response), length) in enumerate(zip(shapes, lengths, strict=True)):
        start = len(rows)
        rows += [(sample, position) for position in range(length)]
        tokens += [(start + t, sample) for t in range(prompt + response)]
        predictions += [(start + t - 1, sample) for t in range(prompt, prompt + response) if t > 0]
    assert pack.num_rows == len(rows) + spare * unit
    found = list(zip(pack.sample_of_row.tolist(), pack.position_ids.tolist(), strict=True))
    assert found[: len(rows)] == rows
    assert all(sample >= len(shapes) for sample, _ in found[len(rows) :])
    for spans, expected in ((pack.tokens, tokens), (pack.responses, predictions)):
        held = [
            (row, sample)
            for sample, (start, n) in enumerate(zip(spans.starts, spans.lengths, strict=True))
            for row in range(start, start + n)
        ]
        assert held == expected
    assert pack.num_unpredicted.tolist() == [int(p == 0 and r > 0) for p, r in shapes]


@settings(max_examples=40, deadline=None)
@given(shapes_strategy, st.sampled_from([1, 2, 4]))
def test_the_ranks_hold_each_row_once_and_each_prediction_where_its_piece_says(
    shapes: list[tuple[int, int]], cp: int
) -> None:
    pack = pack_of(shapes, ParallelLayout(cp=cp), None)
    everything = np.arange(pack.num_rows)
    held = [pack.local(everything, rank) for rank in range(cp)]
    assert sorted(np.concatenate(held).tolist()) == everything.tolist()
    for first, second in ((rank, 2 * cp - 1 - rank) for rank in range(cp) if cp > 1):
        # Megatron's zigzag of a sequence: chunks r and 2·C−1−r of 2·C.
        sequences = np.split(everything, pack.cu_seqlens_padded[1:-1])
        chunks = [np.array_split(sequence, 2 * cp) for sequence in sequences]
        own = [of_sequence[chunk] for of_sequence in chunks for chunk in (first, second)]
        assert held[first].tolist() == np.concatenate(own).tolist()
    row_of_entry: dict[int, int] = {}
    for rank in range(cp):
        pieces = pack.response_pieces(rank)
        for place in pieces.positions.tolist():
            row_of_entry[int(pieces.sources[place])] = int(held[rank][place])
    entries = iter(range(sum(r for _, r in shapes)))
    for (_, response), start, n in zip(
        shapes, pack.responses.starts, pack.responses.lengths, strict=True
    ):
        own_entries = [next(entries) for _ in range(response)][response - n :]
        assert [row_of_entry[entry] for entry in own_entries] == list(range(start, start + n))


def test_following_stops_at_the_end_of_each_sequence() -> None:
    pack = pack_of([(1, 2), (2, 0)], ParallelLayout(), 6)
    assert pack.cu_seqlens_padded.tolist() == [0, 3, 5, 6]
    assert pack.following(np.array([1, 2, 3, 4, 5, 6])).tolist() == [2, 3, 0, 5, 0, 0]


def test_a_dummy_is_padding_alone() -> None:
    pack = pack_of([], ParallelLayout(cp=2), None)
    assert (pack.num_rows, pack.max_seqlen, pack.cu_seqlens.tolist()) == (4, 4, [0, 0])
    assert pack.response_pieces(1).num_tokens == 2


def test_spans_join_arrays_of_any_shape_and_fill() -> None:
    spans = Spans(np.array([1, 4]), np.array([2, 1]), 6)
    joined = spans.joined([np.array([[1, 2], [3, 4]]), np.array([[5, 6]])], np.float32)
    assert joined.tolist() == [[0, 0], [1, 2], [3, 4], [0, 0], [5, 6], [0, 0]]
    assert spans.filled(np.array([7.0, 8.0])).tolist() == [0, 7, 7, 0, 8, 0]
    with pytest.raises(ValueError):
        spans.joined([np.zeros(2)], np.float32)

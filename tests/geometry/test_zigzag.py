"""The zigzag index against the layout written out by hand and by brute force."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.geometry import zigzag_indices


def test_one_sequence_cp2_by_hand():
    assert zigzag_indices([0, 8], 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_indices([0, 8], 2, 1).tolist() == [2, 3, 4, 5]


def test_two_sequences_cp4_by_hand():
    assert zigzag_indices([0, 8, 24], 4, 1).tolist() == [1, 6, 10, 11, 20, 21]


def test_cp1_is_identity():
    assert zigzag_indices([0, 3, 10], 1, 0).tolist() == list(range(10))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from([1, 2, 4, 8]))
def test_matches_chunking_each_sequence(units, cp):
    lengths = [2 * cp * u for u in units]
    cu = np.cumsum([0, *lengths])
    for rank in range(cp):
        expected = []
        for start, length in zip(cu, lengths, strict=False):
            chunks = np.split(np.arange(start, start + length), 2 * cp)
            expected += [*chunks[rank], *chunks[2 * cp - 1 - rank]]
        if cp == 1:
            assert sorted(expected) == zigzag_indices(cu, cp, rank).tolist()
        else:
            assert expected == zigzag_indices(cu, cp, rank).tolist()
    everything = np.concatenate([zigzag_indices(cu, cp, r) for r in range(cp)])
    assert sorted(everything.tolist()) == list(range(cu[-1]))


def test_length_that_is_no_multiple_is_named():
    with pytest.raises(ValueError, match="sequence 1 of the pack is 6 tokens long"):
        zigzag_indices([0, 8, 14], 2, 0)


def test_rank_outside_is_an_error():
    with pytest.raises(ValueError, match="rank 2 is outside 0 … 1"):
        zigzag_indices([0, 8], 2, 2)

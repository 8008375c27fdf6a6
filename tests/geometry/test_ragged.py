"""Ragged index arithmetic against values written out by hand."""

from megatron_dynbatch.geometry.ragged import ragged_arange, starts_of


def test_ragged_arange():
    assert ragged_arange([5, 0, 9], [2, 0, 3]).tolist() == [5, 6, 9, 10, 11]
    assert ragged_arange([], []).tolist() == []


def test_starts_of():
    assert starts_of([3, 0, 2]).tolist() == [0, 3, 3]
    assert starts_of([]).tolist() == []

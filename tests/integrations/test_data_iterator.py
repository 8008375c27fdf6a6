"""`DataIterator` follows the list form of a plan."""

from __future__ import annotations

import pytest

from megatron_dynbatch.integrations.data_iterator import DataIterator, get_data_iterator

DATA = {"tokens": [[1], [2, 2], [3]], "reward": [0.1, 0.2, 0.3]}


def test_micro_batches_in_order_dummies_empty_absent_keys_none() -> None:
    iterator = DataIterator(DATA, [[0, 1], [], [2]])
    assert iterator.get_next(["tokens"]) == {"tokens": [[1], [2, 2]]}
    assert iterator.get_next(["reward", "values"]) == {"reward": [], "values": None}
    assert iterator.get_next(["reward"]) == {"reward": [0.3]}


def test_reading_past_the_end_is_an_error_and_reset_starts_again() -> None:
    iterator = DataIterator(DATA, [[2]])
    iterator.get_next(["reward"])
    with pytest.raises(IndexError, match="all 1 micro-batches were read"):
        iterator.get_next(["reward"])
    assert iterator.reset().get_next(["reward"]) == {"reward": [0.3]}


def test_each_model_chunk_has_its_own_position() -> None:
    first, second = get_data_iterator(DATA, [[0], [1]], num_model_chunks=2)
    first.get_next(["reward"])
    assert second.get_next(["reward"]) == {"reward": [0.1]}

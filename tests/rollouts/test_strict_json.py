"""JSON that could be understood in two ways is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.rollouts.strict_json import parse_json

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)  # fmt: skip


@given(plain)
def test_what_json_writes_is_read(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert parse_json(text) == value and parse_json(text.encode()) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 1}', "key 'a' is there twice"),
        ('[{"b": {"a": 1, "c": 2, "a": 3}}]', "key 'a' is there twice"),
        ("1e999", "number 1e999 is not finite"),
        ("[-1e999]", "is not finite"),
        ("NaN", "number NaN is not finite"),
        ("Infinity", "is not finite"),
        ('"\\ud800"', "half of a surrogate pair"),
        ('{"\\udfff": 1}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * 5000, "Exceeds the limit"),
        (b"\xff", "codec can't decode"),
        ('"a"'.encode("utf-16"), "codec can't decode"),
        ("", "Expecting value"),
    ],
)
def test_two_meanings_are_none(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_pairs_of_surrogates_and_numbers_that_are_not_finite_where_they_may_be() -> None:
    assert parse_json('"\\ud83d\\ude00"') == "😀"
    assert parse_json("[1e999, NaN]", allow_non_finite=True)[0] == float("inf")

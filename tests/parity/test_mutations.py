"""Each factor of the arithmetic, when broken, is noticed by the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.mutations import FAST, MUTATIONS, Mutation, what_fails
from tests.parity.test_layouts import Record, Reference


@pytest.mark.parametrize(
    "mutation",
    [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in MUTATIONS],
    ids=lambda mutation: mutation.name,
)
def test_a_broken_factor_is_noticed(
    mutation: Mutation, short_path: Path, short_reference: Reference, record: Record
) -> None:
    failing = what_fails(mutation, short_path, short_reference(mutation.recipe))
    record("mutations", mutation.name, {"layout": mutation.layout.name, "what fails": failing})
    assert failing and mutation.fails in failing

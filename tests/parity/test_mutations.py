"""Each factor of the arithmetic, when broken, is noticed by the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.mutations import MUTATIONS, RECIPE, Mutation, what_fails
from tests.parity.test_layouts import Record, Reference, full


@full
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_factor_is_noticed(
    mutation: Mutation, short_path: Path, short_reference: Reference, record: Record
) -> None:
    failing = what_fails(mutation, short_path, short_reference(RECIPE))
    record("mutations", mutation.name, {"layout": mutation.layout.name, "what fails": failing})
    assert failing

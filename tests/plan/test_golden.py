"""Fingerprints of plans stay what they are: see `tests.plan.golden`."""

from __future__ import annotations

import pytest

from tests.plan.golden import CASES, FINGERPRINTS, plan_case


@pytest.mark.parametrize("name", CASES)
def test_fingerprint(name: str) -> None:
    assert plan_case(name).fingerprint == FINGERPRINTS[name]

"""Junk in every public function that takes data from outside; `make fuzz` tries more of it."""

from __future__ import annotations

import os
import random

import pytest

from megatron_dynbatch.errors import DynbatchError
from tests.reliability.junk import ENTRIES

COUNT = 20_000 if os.environ.get("FUZZ") == "full" else 60


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ENTRIES)
def test_junk_is_our_error_or_does_no_harm(name: str) -> None:
    num_refused = 0
    for seed in range(COUNT):
        try:
            ENTRIES[name](random.Random(f"{name} {seed}"))
        except DynbatchError:
            num_refused += 1
        except BaseException as error:
            raise AssertionError(f"{name}, seed {seed}: {type(error).__name__}") from error
    assert num_refused > COUNT / 10

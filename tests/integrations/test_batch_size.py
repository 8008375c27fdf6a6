"""The batch size that is a multiple of the data-parallel size."""

from __future__ import annotations

import pytest

from megatron_dynbatch.integrations.batch_size import compute_dynamic_global_batch_size
from megatron_dynbatch.plan import PlanError


@pytest.mark.parametrize(
    ("num_samples", "dp", "expected"), [(10, 4, 8), (3, 4, 4), (0, 4, 4), (12, 4, 12), (9, 1, 9)]
)
def test_dynamic_global_batch_size(num_samples: int, dp: int, expected: int) -> None:
    assert compute_dynamic_global_batch_size(num_samples, dp) == expected


def test_no_rank_and_fewer_than_no_samples() -> None:
    with pytest.raises(PlanError, match="got 4 and 0"):
        compute_dynamic_global_batch_size(4, 0)
    with pytest.raises(PlanError, match="got -1 and 2"):
        compute_dynamic_global_batch_size(-1, 2)

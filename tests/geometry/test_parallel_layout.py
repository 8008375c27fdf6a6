"""Padding and admissible counts, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dynbatch.plan import ParallelLayout, PlanError, padded_length, padded_micro_batch


@pytest.mark.parametrize(
    ("layout", "sample", "micro_batch"),
    [
        (ParallelLayout(), 13, 13),
        (ParallelLayout(cp=2), 16, 16),
        (ParallelLayout(cp=4), 16, 16),
        (ParallelLayout(cp=2, tp=4, sequence_parallel=True), 16, 16),
        (ParallelLayout(cp=2, tp=4), 16, 16),
        (ParallelLayout(cp=2, tp=3, sequence_parallel=True), 16, 24),
        (ParallelLayout(fp8="fp8"), 13, 16),
        (ParallelLayout(cp=2, fp8="mxfp8"), 16, 64),
        (ParallelLayout(cp=2, tp=3, sequence_parallel=True, fp8="fp8"), 16, 96),
    ],
)
def test_padding_of_thirteen_tokens(layout: ParallelLayout, sample: int, micro_batch: int) -> None:
    assert padded_length(13, layout) == sample
    assert padded_length(np.array([13, 1]), layout)[0] == sample
    assert padded_micro_batch(sample, layout) == micro_batch


@pytest.mark.parametrize(("pp", "group"), [(2, 2), (2, 3), (2, 4), (4, 4), (4, 6), (3, 7)])
def test_admissible_counts_of_the_interleaved_schedule(pp: int, group: int) -> None:
    layout = ParallelLayout(pp=pp, vpp=2, vpp_group=group)
    # planning.md: M >= group, and M mod group is 0 or at least pp.
    accepted = [m for m in range(1, 60) if m >= group and m % group in {0, *range(pp, group)}]
    assert [m for m in range(1, 60) if layout.admits(m)] == accepted
    for count in range(0, 40):
        assert layout.next_admissible(count) == min(m for m in accepted if m >= count)


def test_every_count_from_one_is_admissible_without_chunks() -> None:
    layout = ParallelLayout(pp=4)
    assert [layout.next_admissible(count) for count in (0, 1, 2, 7)] == [1, 1, 2, 7]
    assert not layout.admits(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pp": 4, "vpp": 2, "vpp_group": 2}, "vpp_group=2 must be at least pp=4"),
        ({"dp": 0}, "dp must be a positive int, got 0"),
        ({"vpp": 2}, "needs pp > 1"),
        ({"fp8": "e4m3"}, "got 'e4m3'"),
    ],
)
def test_layouts_that_cannot_be(fields: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ParallelLayout(**fields)  # type: ignore[arg-type]

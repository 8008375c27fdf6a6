"""`build_dp_schedule`: the contract of the list form."""

from __future__ import annotations

import pytest

from megatron_dynbatch.integrations.schedule import build_dp_schedule
from megatron_dynbatch.plan import ParallelLayout, PlanError, PlanOptions

CAP = PlanOptions(max_tokens_per_gpu=10)


def test_list_form_of_a_batch_in_two_steps() -> None:
    schedule = build_dp_schedule(
        [9, 9, 9, 4, 5],
        rollout_indices=[0, 0, 1, 2, None],
        global_batch_size=2,
        layout=ParallelLayout(dp=2),
        options=CAP,
    )
    assert schedule.global_batch_sizes == [2, 2]
    assert schedule.num_microbatches == [2, 1]
    assert sorted(row for rows in schedule.partitions for row in rows) == [0, 1, 2, 3, 4]
    # Three full micro-batches on two ranks: one dummy, an empty list that counts.
    assert sum(not mb for rank in schedule.micro_batch_indices for mb in rank) == 1
    for rows, micro_batches in zip(schedule.partitions, schedule.micro_batch_indices, strict=True):
        assert len(micro_batches) == 3
        assert [local for mb in micro_batches for local in mb] == list(range(len(rows)))


def test_every_sample_needs_a_length_and_a_rollout() -> None:
    with pytest.raises(PlanError, match="2 total_lengths but 1 rollout_indices"):
        build_dp_schedule([4, 5], rollout_indices=[0], options=CAP)

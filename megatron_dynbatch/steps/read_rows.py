"""What a rank reads of a batch: its own samples, held against what was planned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from megatron_dynbatch.plan import Plan
from megatron_dynbatch.rollouts import RolloutDataError, RolloutSource, Sample, SampleIndex
from megatron_dynbatch.steps.announcement import Origins, rows_by_batch


def rows_of_rank(plan: Plan, dp_rank: int, first_step: int) -> list[int]:
    """Plan rows of a data-parallel rank from a step on, ascending."""
    steps = plan.steps[first_step:]
    return sorted({row for s in steps for m in s.micro_batches[dp_rank] for row in m})


def read_rows(
    source: RolloutSource,
    index: SampleIndex,
    origins: Origins,
    rows: Iterable[int],
    fields: Collection[str] | None,
) -> dict[int, Sample]:
    """Samples of some plan rows.

    Args:
        source: Where rollout batches come from.
        index: What was planned.
        origins: (batch, row in it) of each plan row.
        rows: Which plan rows.
        fields: Optional fields to read; None: all.

    Raises:
        RolloutDataError: A sample is damaged, or not as long as it was when it was planned.
    """
    place = {origins[row]: row for row in rows}
    samples: dict[int, Sample] = {}
    for batch, own_rows in rows_by_batch(list(place)).items():
        for own_row, sample in zip(own_rows, source.read(batch, own_rows, fields), strict=True):
            row = place[batch, own_row]
            seen = (sample.total_length, sample.mask_sum)
            planned = (int(index.total_lengths[row]), int(index.mask_sums[row]))
            if seen != planned:
                raise RolloutDataError(
                    f"row {own_row} of rollout batch {batch} in {source} has (length, trained "
                    f"tokens) {seen} but was planned with {planned}: the batch changed after it "
                    "was announced"
                )
            samples[row] = sample
    return samples


def sample_of_lengths(index: SampleIndex, row: int) -> Sample:
    """A sample of which only the lengths are known."""
    tokens, response = int(index.total_lengths[row]), int(index.response_lengths[row])
    return Sample(np.zeros(tokens, np.int64), loss_mask=np.zeros(response, np.uint8))


def check_log_probs(
    samples: Mapping[int, Sample], origins: Origins, fields: Collection[str] | None
) -> None:
    """Raises RolloutDataError if a sample lacks the log-probs that importance weights need."""
    if fields is not None and "rollout_log_probs" not in fields:
        return
    for row, sample in samples.items():
        if sample.rollout_log_probs is None and sample.mask_sum:
            origin, own_row = origins[row]
            raise RolloutDataError(
                f"row {own_row} of rollout batch {origin} has no rollout_log_probs: rollouts older "
                "than the staleness limit can be trained only with importance weights; give them, "
                "or let stale rollouts be dropped"
            )

"""`build_dp_schedule`: lengths in, lists out, for trainers that hold schedules in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.list_form import Schedule
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.planner import make_plan
from megatron_dynbatch.rollouts.index import SampleIndex


def build_dp_schedule(
    total_lengths: Sequence[int],
    *,
    rollout_indices: Sequence[int | None] | None = None,
    global_batch_size: int | None = None,
    layout: ParallelLayout | None = None,
    options: PlanOptions,
) -> Schedule:
    """Plan a batch that is known by its lengths only.

    Args:
        total_lengths: Tokens of each sample [S].
        rollout_indices: Rollout of each sample [S]; None (the whole list, or an entry) makes a
            sample a rollout of its own.
        global_batch_size: Rollouts per step; None keeps `options.rollouts_per_step`.
        layout: The parallel layout; None is a single rank.
        options: Caps and policies; the loss reduction does not matter here.

    Raises:
        PlanError: As `make_plan`; also lists of different lengths.
    """
    num_samples = len(total_lengths)
    if rollout_indices is None:
        rollout_indices = [None] * num_samples
    if len(rollout_indices) != num_samples:
        raise PlanError(
            f"{num_samples} total_lengths but {len(rollout_indices)} rollout_indices: every "
            "sample needs one of each"
        )
    lengths = np.asarray(total_lengths)
    index = SampleIndex(
        total_lengths=lengths,
        response_lengths=lengths,
        mask_sums=lengths,
        rollout_ids=np.array([-1 if i is None else i for i in rollout_indices]),
        group_ids=np.full(num_samples, -1, dtype=np.int64),
    )
    if global_batch_size is not None:
        options = replace(options, rollouts_per_step=global_batch_size)
    return make_plan(index, layout or ParallelLayout(), options).to_schedule()

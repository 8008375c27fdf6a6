"""One step on one rank: what its micro-batches hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps import StepFeed


def test_arrays_of_the_users_own_follow_the_tokens(tmp_path: Path) -> None:
    """cp 2 cuts each sample, padded to a multiple of 4, in chunks 0, 3 and 1, 2."""
    source = RolloutDirectory(tmp_path / "r")
    experts = [np.arange(2 * t).reshape(t, 2, 1) + 100 * i for i, t in enumerate((3, 5))]
    source.write(
        [
            Sample(
                range(len(e)), 2, token_arrays={"experts": e}, response_arrays={"score": [1.5, 2.5]}
            )
            for e in experts
        ]
    )
    source.finish()
    layout = ParallelLayout(cp=2)
    options = PlanOptions(max_tokens_per_gpu=6)
    full = np.zeros((12, 2, 1), np.int64)
    full[:3], full[4:9] = experts
    scores = np.zeros(12)
    scores[[0, 1, 6, 7]] = [1.5, 2.5, 1.5, 2.5]
    for cp_rank, own in ((0, [0, 3, 4, 5, 10, 11]), (1, [1, 2, 6, 7, 8, 9])):
        step = StepFeed(source, layout, options, cp_rank=cp_rank).open_step()
        assert step is not None and step.packed(0).sample_rows == (0, 1)
        assert step.extra(0, "experts").tolist() == full[own].tolist()
        assert step.extra(0, "score").tolist() == scores[own].tolist()
        with pytest.raises(ValueError, match="no sample of this rank has an array 'other'"):
            step.extra(0, "other")

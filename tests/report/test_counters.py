"""What a real training counts: the LR horizon is in rollouts, whatever the steps' sizes."""

from pathlib import Path

import numpy as np
import pytest

from megatron_dynbatch.report import read_step_reports
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from tests.parity.job import Cell, run_cell
from tests.parity.reference import Recipe

SIZES = (24, 8, 24, 8)
PEAK = 1e-2


def test_learning_rate_factors_of_unequal_steps(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "rollouts")
    for size in SIZES:
        # Four samples of 8 tokens fill a micro-batch; every second rollout has two.
        fan_out = [i for i in range(size) for _ in range(1 + i % 2)]
        directory.write([Sample(np.arange(8) + i, 4, rollout_id=i) for i in fan_out])
    directory.finish()
    flags: dict[str, object] = {
        "dynamic-global-batch": True,
        "rollout-path": tmp_path / "rollouts",
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": 32,
        "train-samples": 64,
        "step-report": tmp_path / "steps.jsonl",
    }
    (observed,) = run_cell(Cell(1, flags, Recipe(learning_rate=PEAK, decay=64)))
    used = np.array(observed.learning_rates) / PEAK
    assert used == pytest.approx([1, 0.625, 0.5, 0.125], rel=1e-12)
    assert observed.rows[-1]["learning_rate"] == 0
    reports = read_step_reports(tmp_path / "steps.jsonl")
    assert [r.step_global_batch_size for r in reports] == list(SIZES)
    # Eight rollouts, twelve samples in three micro-batches, advance the schedule by eight.
    assert (reports[1].num_samples, reports[1].num_microbatches) == (12, 3)
    assert [r.consumed_rollouts for r in reports] == [24, 32, 56, 64]

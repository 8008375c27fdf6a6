"""examples/pretrain_gpt_dynamic.sh; with MEGATRON_LM set, the pretrain_gpt.py of that checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.custom_step_splitter import similar_tokens
from megatron_dynbatch.plan import PlanOptions
from megatron_dynbatch.report import read_step_reports
from megatron_dynbatch.rollouts import SampleIndex
from tests.pool import ROOT


@pytest.mark.slow
def test_the_stock_script_trains_steps_of_any_size(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "pretrain_gpt_dynamic.sh"), "--step-progress", "bar"],
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "run")},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    reports = read_step_reports(tmp_path / "run" / "steps.jsonl")
    assert [r.step_global_batch_size for r in reports] == [8, 5, 12, 3]
    # One to three samples by turns.
    assert [r.num_samples for r in reports] == [15, 9, 24, 6]
    assert reports[-1].consumed_rollouts == 28
    # Rank 0 draws the first micro-batch at once.
    assert "batch 0, step" in done.stderr and "8 rollouts" in done.stderr


def test_similar_tokens_on_a_batch_worked_out_by_hand() -> None:
    import numpy as np

    lengths = np.array([9, 1, 8, 2, 3, 3])
    absent = np.full(6, -1, dtype=np.int64)
    # Rollout 0 has 9 + 1 tokens in two samples; the others one sample each.
    index = SampleIndex(lengths, lengths, lengths, np.array([0, 0, 1, 2, 3, 4]), absent)
    steps = similar_tokens(index, PlanOptions(max_tokens_per_gpu=16, rollouts_per_step=3))
    # 10 | 8, then 3 to the second (11), 3 to the first (13), 2 to the second (13).
    assert steps == [[0, 4], [1, 3, 2]]

"""examples/grpo_sync.py at toy size: two ranks, rollouts in memory only."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dynbatch.report.step_report import read_step_reports
from tests.examples.launching import launch

pytest.importorskip("reasoning_gym")


# Weights large enough that attention is far from even, so that positions and heads matter.
ROTARY = (
    "--position-embedding-type", "rope", "--group-query-attention", "--num-query-groups", "2",
    "--init-method-std", "0.3",
)  # fmt: skip


@pytest.mark.parametrize("model", [(), ROTARY], ids=["learned", "rotary, shared keys"])
def test_rollouts_are_generated_at_each_step_boundary(
    tmp_path: Path, model: tuple[str, ...]
) -> None:
    from examples.demo.runs import MODEL

    flags = [
        "--module", "examples.grpo_sync", *MODEL, *model, "--seed", "1", "--groups", "3",
        "--lr", "1e-3", "--lr-decay-style", "constant", "--train-iters", "3",
        "--dynamic-global-batch", "--rollout-path", "queue:grpo", "--rollouts-per-step", "100",
        "--max-tokens-per-gpu", "256", "--micro-batch-width", "variable",
        "--step-report", str(tmp_path / "steps.jsonl"),
    ]  # fmt: skip
    launch(2, flags)
    reports = read_step_reports(tmp_path / "steps.jsonl")
    assert [report.batch_id for report in reports] == [0, 1, 2]
    # On-policy: the log-probs that the sampler reported are those of the trained model.
    assert [report.metrics["ratio"] for report in reports] == pytest.approx([1.0] * 3, abs=1e-5)
    # Three groups of 4 to 8 rollouts, those without any advantage left out.
    assert all(1 <= report.step_global_batch_size <= 24 for report in reports)

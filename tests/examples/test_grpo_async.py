"""examples/grpo_async_ray.py at toy size: Ray workers generate, Megatron trains, both at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dynbatch.report.step_report import read_step_reports
from tests.pool import ROOT

pytestmark = pytest.mark.slow

pytest.importorskip("ray")
pytest.importorskip("reasoning_gym")

from examples.demo.agent import Policy  # noqa: E402


def broken_engine(weights_path: str, version: int) -> Policy:
    """An inference engine that does not come up."""
    raise RuntimeError(f"no engine for version {version}")


def test_an_error_of_the_generators_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from examples.grpo_async_ray import main

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine = ["--engine", "tests.examples.test_grpo_async:broken_engine", "--workers", "1"]
    try:
        with pytest.raises(RuntimeError, match="no engine for version 0"):
            main(["--out", str(tmp_path), *engine])
    finally:
        ray.shutdown()


def test_generation_runs_ahead_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.grpo_async_ray import main

    # Ray's workers and the training do not share this folder.
    monkeypatch.chdir(tmp_path)
    arguments = ["--batches", "3", "--groups", "2", "--workers", "1", "--max-staleness", "1"]
    main(["--out", ".", *arguments])
    reports = read_step_reports(tmp_path / "steps.jsonl")
    assert [report.batch_id for report in reports] == [0, 1, 2]
    assert all(report.metrics["ratio"] == pytest.approx(1.0, abs=0.2) for report in reports)
    lines = (tmp_path / "generation.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch_id"] for line in lines] == [0, 1, 2]
    # The trainer would drop and count what is older than the limit; here nothing was.
    assert sum(report.step_global_batch_size for report in reports) == reports[-1].consumed_rollouts
    # Only the newest weights are kept.
    kept = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert kept[-1] >= "weights-00000002.pt" and len(kept) <= 3

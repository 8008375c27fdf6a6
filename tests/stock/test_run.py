"""The comparison that `make test-stock` records."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_dynbatch.report import StepReport
from megatron_dynbatch.rollouts import RolloutDirectory
from tests.stock.run import STEP_SIZES, Result, record, relative_difference, write_rollouts

REPORT = StepReport(
    iteration=1,
    batch_id=0,
    step_index=0,
    step_global_batch_size=8,
    num_samples=20,
    num_microbatches=3,
    num_dummies=0,
    num_tokens=500,
    num_trained_tokens=200,
    fill=0.6,
    consumed_rollouts=8,
    learning_rate=1e-2,
    grad_norm=2.0,
    loss_scale=1.0,
    skipped=False,
    metrics={"lm loss": 4.0},
)
RUN = [REPORT] * len(STEP_SIZES)


def test_the_largest_relative_difference_of_any_step_counts() -> None:
    other = [*RUN[:-1], dataclasses.replace(REPORT, grad_norm=2.002)]
    assert relative_difference(RUN, RUN) == 0.0
    assert abs(relative_difference(other, RUN) - 1e-3) < 1e-12


def test_other_counts_or_missing_steps_never_agree() -> None:
    other = [*RUN[:-1], dataclasses.replace(REPORT, consumed_rollouts=9)]
    assert relative_difference(other, RUN) == float("inf")
    assert relative_difference(RUN[1:], RUN) == float("inf")


def test_what_is_not_finite_never_agrees() -> None:
    for name in ("grad_norm", "learning_rate"):
        off = [*RUN[:-1], dataclasses.replace(REPORT, **{name: float("nan")})]
        assert relative_difference(off, RUN) == relative_difference(off, off) == float("inf")
    off = [dataclasses.replace(REPORT, metrics={"lm loss": float("nan")}), *RUN[1:]]
    assert relative_difference(off, RUN) == float("inf")


def test_record_names_commit_and_verdict() -> None:
    text = record("abc123", [Result("DP2", RUN, RUN, 0.0), Result("PP2", RUN, RUN, 1e-3)])
    assert "`abc123`" in text
    assert "| DP2 | 6 | 0.0e+00 | 4.000000 → 4.000000 | agrees |" in text
    assert "| PP2 | 6 | 1.0e-03 | 4.000000 → 4.000000 | DIFFERS |" in text


def test_rollouts_make_one_batch_per_step(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts")
    directory = RolloutDirectory(tmp_path / "rollouts")
    sizes = [directory.index(k).num_rollouts for k in range(len(STEP_SIZES))]
    assert sizes == list(STEP_SIZES)
    assert directory.state(len(STEP_SIZES)) == "end"

"""The demo's two trainings on the real Megatron: on-policy, resumable, the same in every layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from examples.demo.__main__ import show
from examples.demo.results import rise, step_rows
from examples.demo.runs import LAYOUTS, SeedRun, Settings
from examples.demo.training import read_json_lines
from tests.examples.launching import launch, untrained

RANKS = 2


def train_policy(run: SeedRun, *, warm: bool = False) -> list[dict[str, float]]:
    """Step reports of the reinforcement learning, metrics among the other numbers."""
    run.folder.mkdir(exist_ok=True)
    flags = run.policy_launch()
    is_resumed = "--finetune" not in flags
    launch(RANKS, flags if warm or is_resumed else untrained(flags))
    return [{**vars_of(report), **report.metrics} for report in run.reports()]


def vars_of(report: object) -> dict[str, float]:
    values = dataclasses.asdict(report)  # type: ignore[call-overload]
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and name not in ("step_time", "wait_time")
    }


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS if x != "dp2")]
)
def test_generator_agrees_with_megatron_in_every_layout(layout: str, tmp_path: Path) -> None:
    run = SeedRun(tmp_path / "seed", 1, Settings(layout=layout, steps=3, groups=6))
    steps = train_policy(run)
    assert len(steps) == 3
    for step in steps:
        if step["step_index"] == 0:
            # Trained by the weights that sampled: every ratio is 1 up to float32.
            assert step["ratio"] == pytest.approx(1.0, abs=1e-5)
            assert abs(step["approx_kl"]) < 1e-6
            assert step["clip_fraction"] == 0.0
    assert len({step["num_samples"] for step in steps}) > 1


@pytest.mark.slow
def test_a_resumed_run_repeats_what_was_lost(tmp_path: Path) -> None:
    run = SeedRun(tmp_path / "seed", 1, Settings(steps=7, groups=6))
    whole = train_policy(run)
    # As if killed after the seventh step: the last checkpoint is that of the fifth.
    (run.checkpoint / "latest_checkpointed_iteration.txt").write_text("5")
    before = read_json_lines(run.steps_file)
    again = train_policy(run)
    lines = read_json_lines(run.steps_file)
    assert [line["iteration"] for line in lines[len(before) :]] == [6, 7]
    assert again == whole


def test_shuffled_advantages_teach_nothing_and_are_reported(tmp_path: Path) -> None:
    run = SeedRun(
        tmp_path / "seed", 1, Settings(warm_up_steps=8, steps=10, shuffle_advantages=True)
    )
    run.folder.mkdir()
    run.write_demonstrations()
    launch(RANKS, run.warm_up_launch())
    train_policy(run, warm=True)
    episodes = read_json_lines(run.episodes_file)
    rows = step_rows(run.reports(), episodes)
    before, after = rise(rows)
    assert after - before < 0.1
    assert np.isfinite([row["loss"] for row in rows]).all()

    show(tmp_path, [run], seconds=1.0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["seeds"][0]["steps"] == rows
    # A batch is two steps or three; of the last, a step may be left when the training ends.
    missing = sum(row["G"] for row in rows) - summary["control"]["rollouts"]
    assert 0 <= missing <= sum(row["G"] for row in rows[-2:])
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert page.count("<tr>") == 1 + len(rows)

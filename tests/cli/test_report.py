"""`report`: what it reads, what it draws, and that the page stands alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dynbatch._version import __version__
from megatron_dynbatch.cli.main import main
from megatron_dynbatch.cli.report import curves_of, figures_of, run_section
from megatron_dynbatch.cli.report_data import RunData, plan_of_step, read_run
from megatron_dynbatch.report import StepReport
from megatron_dynbatch.report.identity import write_identity
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from tests.cli.run_folder import write_run

pytest.importorskip("matplotlib")

from megatron_dynbatch.cli.plan_plot import number_format  # noqa: E402
from megatron_dynbatch.cli.report_charts import INK, ink_on, robust_line  # noqa: E402
from megatron_dynbatch.cli.report_page import write_page  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    write_run(path, num_batches=4)
    return path


def report(iteration: int, **changes: object) -> StepReport:
    values = dict.fromkeys(StepReport.__dataclass_fields__, 0) | {
        "iteration": iteration, "metrics": {}, "skipped": False, "fill": 0.5, "num_samples": 4,
        "step_global_batch_size": 2, "num_microbatches": 1, "num_tokens": 100,
    }  # fmt: skip
    return StepReport(**{**values, **changes})  # type: ignore[arg-type]


def test_page_and_pictures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder), "--title", "Runs & more"]) == 0
    out = folder / "report"
    steps = len(read_run(folder).reports)
    assert capsys.readouterr().out == f"{steps} steps: {out / 'report.html'}\n"
    for name in ("history", "times", "plan", "samples"):
        for ending in ("", "-narrow"):
            assert (out / f"{name}{ending}.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    # Each picture is there twice; screens of at most 600 pixels take the narrow one.
    assert page.count("data:image/png;base64,") == 8
    assert page.count('<source media="(max-width: 600px)"') == 4
    assert "prefers-color-scheme: dark" in page
    assert f"{steps} rows of " in page and "scroll down and to the right" in page
    assert "<h1>Runs &amp; more</h1>" in page and page.count("<tr>") == steps + 1
    # The layout is known from the rollouts, the command is not.
    assert "<dt>layout</dt><dd>dp 2, cp 1, tp 1, pp 2" in page and "are not known" in page
    # It stands alone: nothing is loaded from elsewhere.
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page


def test_heading_and_picture_name_the_same_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_dynbatch.cli import plan_plot, report

    titles: list[str] = []
    title = plan_plot._title

    def recorded(*arguments: Any) -> str:
        titles.append(title(*arguments))
        return titles[-1]

    monkeypatch.setattr(plan_plot, "_title", recorded)
    data = read_run(folder)
    largest = max(data.reports, key=lambda r: r.num_samples)
    (heading, *_) = report.plan_sections(data, tmp_path)
    assert f"The plan of the largest step ({largest.iteration})" in heading
    assert all(text.startswith(f"Step {largest.iteration}: ") for text in titles)


def test_the_run_is_named(folder: Path, tmp_path: Path) -> None:
    steps = tmp_path / "steps.jsonl"
    steps.write_text(json.dumps(vars_of(report(1))) + "\n")
    args = SimpleNamespace(num_layers=32, hidden_size=4096, num_experts=None)
    write_identity(steps, args, {"dp": 4, "tp": 2, "fp8": None, "sequence_parallel": True})
    page = run_section(read_run(tmp_path))
    assert "<dt>layout</dt><dd>dp 4, tp 2, sequence_parallel True</dd>" in page
    assert "<dt>model</dt><dd>num_layers 32, hidden_size 4096</dd>" in page
    assert f"megatron_dynbatch {__version__}, python 3." in page and "<dt>command</dt>" in page


def test_columns_that_are_left_out_are_named(tmp_path: Path) -> None:
    metrics = {f"metric {number}": 1.0 for number in range(8)}
    write_page(
        tmp_path / "page.html", title="", subtitle="", figures={}, sections=[],
        reports=[report(1, metrics=metrics)], rewards={},
    )  # fmt: skip
    page = (tmp_path / "page.html").read_text()
    assert "Not in the table, but in the step reports: metric 6, metric 7." in page


def test_the_line_begins_where_the_cloud_does_and_slow_steps_do_not_tilt_it() -> None:
    x = np.arange(1.0, 60.0)
    y = 3.0 + 0.5 * x
    y[[4, 50]] += 400.0
    assert robust_line(x, y) == pytest.approx((3.0, 0.5))
    # Without any relation there is no slope below 0, and the line is the middle.
    assert robust_line(np.ones(3), np.array([1.0, 2.0, 9.0])) == (2.0, 0.0)
    # No step takes less than nothing: the line through 0 then, with the middle of the ratios.
    assert robust_line(np.array([2.0, 4.0, 5.0]), np.array([1.0, 4.0, 6.0])) == (0.0, 1.0)


def test_numbers_of_axes_and_their_ink_can_be_read() -> None:
    assert number_format(1.5e7)(1.25e7) == "12.5M"
    assert [ink_on(colour) for colour in ((0.12, 0.47, 0.71, 1.0), (1.0, 0.73, 0.47, 1.0))] == [
        "white", INK
    ]  # fmt: skip


def test_rewards_come_from_the_rollouts_and_count_a_rollout_once(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "rollouts")
    # Rollout 0 emitted three samples: the mean over rollouts is 0.5, over samples 0.75.
    rows = [(0, 1.0), (0, 1.0), (0, 1.0), (1, 0.0)]
    directory.write([Sample([1, 2], response_length=1, rollout_id=r, reward=x) for r, x in rows])
    line = json.dumps(vars_of(report(1, num_samples=4)))
    (tmp_path / "steps.jsonl").write_text(line + "\n")
    run = read_run(tmp_path)
    assert run.rewards == {0: 0.5}
    (tmp_path / "scores.jsonl").write_text('{"batch_id": 0, "rollout/reward": 0.25}\n')
    assert read_run(tmp_path).rewards == {0: 0.25}


def vars_of(one: StepReport) -> dict[str, object]:
    return {name: getattr(one, name) for name in StepReport.__dataclass_fields__}


def test_a_step_that_ran_again_counts_once(tmp_path: Path) -> None:
    lines = [report(1), report(2, num_samples=4), report(2, num_samples=6)]
    text = "".join(json.dumps(vars_of(one)) + "\n" for one in lines)
    (tmp_path / "steps.jsonl").write_text(text + '{"iteration": 3, "cut of')
    assert [r.num_samples for r in read_run(tmp_path).reports] == [4, 6]


def test_figures_are_sums_and_spans() -> None:
    steps = [
        report(1, step_global_batch_size=2, num_samples=5),
        report(2, step_global_batch_size=7, num_samples=9, step_time=4.0, wait_time=1.0),
    ]
    figures = figures_of(RunData(Path("x"), steps))
    assert figures["rollouts per step"] == "2 to 7" and figures["rollouts"] == "9"
    assert figures["samples"] == "14" and figures["micro-batches per rank"] == "1"
    # Both have a step time of 0 or 4 seconds; 1 of 4 was waited.
    assert figures["of the time, waiting for rollouts"] == "25%"


def test_curves_are_those_that_are_known() -> None:
    steps = [report(1, batch_id=3, metrics={"lm loss": 2.0}), report(2, batch_id=4)]
    curves = curves_of(RunData(Path("x"), steps, {3: 0.5}))
    assert list(curves.values()) == [([1], [0.5]), ([1], [2.0])]


def test_the_plan_is_that_of_the_step_or_none(folder: Path) -> None:
    run = read_run(folder)
    largest = max(run.reports, key=lambda r: r.num_samples)
    plan = plan_of_step(run, largest)
    assert plan is not None
    assert plan.steps[largest.step_index].num_samples == largest.num_samples
    # A step with carried samples has another size than the plan of its batch says.
    other = report(1, batch_id=largest.batch_id, step_index=0, num_samples=999)
    assert plan_of_step(run, other) is None
    assert plan_of_step(run, report(1, batch_id=77)) is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no step reports; train with --step-report"),
        ({"steps.jsonl": ""}, "no step has been reported yet"),
        ({"a.jsonl": "{}", "b.jsonl": "{}"}, "holds no step reports"),
    ],
)
def test_folders_without_reports(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


def test_several_files_of_reports_must_be_chosen_from(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(vars_of(report(1))) + "\n")
    with pytest.raises(ValueError, match="several files hold step reports: .*use --steps"):
        read_run(tmp_path)
    assert len(read_run(tmp_path, steps=tmp_path / "a.jsonl").reports) == 1
    with pytest.raises(ValueError, match="no such directory"):
        read_run(tmp_path / "nothing")

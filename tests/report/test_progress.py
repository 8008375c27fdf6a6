"""The progress line: bars on a terminal, lines of text elsewhere, never more often than needed."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dynbatch.hooks.progress import StepProgress, step_progress
from megatron_dynbatch.report.progress import ProgressLine
from tests.hooks.helpers import training_options

ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Recorder:
    """Takes the place of a line and keeps what it was asked to show."""

    def __init__(self) -> None:
        self.shown: list[tuple[Any, str]] = []

    is_due = True

    def show(self, bars: Any, note: str = "") -> None:
        self.shown.append((bars, note))


def step(num_micro_batches: int, index: int) -> Any:
    return SimpleNamespace(
        num_microbatches=num_micro_batches, batch_id=7, step_index=index,
        plan=SimpleNamespace(steps=[None] * 3), step_global_batch_size=5,
    )  # fmt: skip


def test_steps_and_micro_batches_are_counted_over_model_chunks() -> None:
    line = Recorder()
    progress = StepProgress(line, num_chunks=2)  # type: ignore[arg-type]
    first, second = step(2, 0), step(1, 1)
    for current in (first, first, first, first, second, second, second):
        progress.begin_micro_batch(current)
    counts = [(bars[0][1:], bars[1][1:]) for bars, _ in line.shown]
    # Two chunks run each micro-batch; a replayed step never shows more than it has.
    assert counts == [
        ((1, 3), (1, 2)), ((1, 3), (1, 2)), ((1, 3), (2, 2)), ((1, 3), (2, 2)),
        ((2, 3), (1, 1)), ((2, 3), (1, 1)), ((2, 3), (1, 1)),
    ]  # fmt: skip
    assert line.shown[0][0][0][0] == "batch 7, step" and line.shown[0][1] == "5 rollouts"


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_bars_are_one_line_that_gives_way(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = io.StringIO()
    line = ProgressLine(stream, bars=True)
    line.show([("batch 3, step", 1, 3), ("micro-batch", 4, 10)], "32 rollouts")
    line.show([("batch 3, step", 1, 3), ("micro-batch", 5, 10)])  # too soon
    text = stream.getvalue()
    assert "\n" not in text and text.endswith("\r") and text.startswith("\033[2K\r")
    plain = ESCAPES.sub("", text).strip("\r")
    assert re.fullmatch(r"batch 3, step \S+ +1/3 micro-batch \S+ +4/10 32 rollouts *", plain)
    assert len(plain) < columns
    line.clear()
    assert stream.getvalue().endswith("\033[2K\r")


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    ProgressLine(stream, bars=True).show([("step", 1, 3)])
    assert not re.search(r"\x1b\[[0-9;]*m", stream.getvalue())


def test_text_appears_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    line = ProgressLine(stream)  # no terminal
    assert not line.draws_bars
    for done in range(1, 5):
        line.show([("step", done, 4)], "now")
    line.clear()
    assert stream.getvalue() == "step 2 of 4, now\nstep 4 of 4, now\n"


def test_only_rank_0_shows_progress_and_only_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert step_progress(training_options(step_progress="auto")) is not None
    monkeypatch.setenv("RANK", "1")
    assert step_progress(training_options(step_progress="auto")) is None
    monkeypatch.setenv("RANK", "0")
    assert step_progress(training_options(step_progress="off")) is None

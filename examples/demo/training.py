"""Starts Megatron's pretrain in several CPU processes and follows its step reports."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dynbatch.report import StepReport

REPOSITORY = Path(__file__).resolve().parents[2]

_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)
_WAITING_LINE_SECONDS = 10.0
_REASON = re.compile(r"^(?:\[rank\d+\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception|Timeout|Failure)\b.*)")
# They only say that another process failed.
_NOT_THE_REASON = ("ChildFailedError", "RankFailure", "Connection closed by peer")


class TrainingFailed(RuntimeError):
    """Training ended with an error; the message is the reason found in its log."""


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file that may not be there; a last line cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def drop_partial_line(path: Path) -> None:
    """Cut off a last line that a killed writer did not finish, so that the next one is whole."""
    if path.exists():
        text = path.read_bytes()
        path.write_bytes(text[: text.rfind(b"\n") + 1])


def read_reports(path: Path) -> list[StepReport]:
    """Step reports by iteration; of one that ran again after a resume the later report counts."""
    reports = {line["iteration"]: StepReport(**line) for line in read_json_lines(path)}
    return [reports[iteration] for iteration in sorted(reports)]


def train(
    launch: Sequence[str],
    report_file: Path,
    log_file: Path,
    on_step: Callable[[StepReport], None],
    *,
    on_poll: Callable[[], None] = lambda: None,
    num_processes: int = 2,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run Megatron under torchrun until it ends by itself.

    Args:
        launch: Arguments of ``megatron_dynbatch.run --cpu``: a script and its flags.
        report_file: What ``--step-report`` names in them.
        log_file: Gets everything that the processes print.
        on_step: Called once for each step that runs, in order, soon after it.
        on_poll: Called several times a second.
        num_processes: Ranks.
        environment: Variables to set besides those of this process.

    Raises:
        TrainingFailed: A process ended with an error.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={num_processes}",
        "-m", "megatron_dynbatch.run", "--cpu", "--verbose", *launch,
    ]  # fmt: skip
    variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
    seen = len(read_json_lines(report_file))
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=variables,
            preexec_fn=end_with_parent,
        )
        try:
            for report in _follow(process, report_file, seen, on_poll):
                on_step(report)
        finally:
            if process.poll() is None:
                process.terminate()
            code = process.wait()
    if code != 0:
        raise TrainingFailed(f"{_reason(log_file)} (the whole log is in {log_file})")


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies, however it does: nothing is left behind."""
    if sys.platform != "linux":
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _follow(
    process: subprocess.Popen[bytes],
    report_file: Path,
    seen: int,
    on_poll: Callable[[], None],
) -> Iterator[StepReport]:
    """Reports as they appear after the first `seen`, until the process has ended."""
    since = last_line = time.monotonic()
    started = False
    while True:
        ended = process.poll() is not None
        lines = read_json_lines(report_file)
        for line in lines[seen:]:
            yield StepReport(**line)
        if len(lines) > seen:
            seen, started = len(lines), True
            since = last_line = time.monotonic()
        on_poll()
        if ended:
            return
        if not sys.stdout.isatty() and time.monotonic() - last_line > _WAITING_LINE_SECONDS:
            last_line = time.monotonic()
            what = "Megatron" if started else "Megatron to start"
            print(f"  ... waiting for {what} ({last_line - since:.0f} s)", flush=True)
        time.sleep(_POLL_SECONDS)


def _reason(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").splitlines()
    found = []
    for before, line in zip(["", *lines], lines, strict=False):
        if match := _REASON.match(line):
            # An error without a message is told by the line that raised it.
            found.append(match[1] if ":" in match[1] else f"{match[1]} at {before.strip()!r}")
    reasons = [line for line in found if not any(name in line for name in _NOT_THE_REASON)]
    return (reasons or found or ["a process ended without saying why"])[0]

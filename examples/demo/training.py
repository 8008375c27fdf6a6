"""Starts Megatron's pretrain in several CPU processes and follows its step reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_dynbatch.report import StepReport, read_step_reports

REPOSITORY = Path(__file__).resolve().parents[2]

_POLL_SECONDS = 0.1
_WAITING_LINE_SECONDS = 5.0
_REASON = re.compile(r"^(?:\[rank\d+\]:)?\s*((?:\w+\.)*\w*(?:Error|Exception|Timeout|Failure): .+)")
# They only say that another process failed.
_NOT_THE_REASON = ("ChildFailedError", "RankFailure", "Connection closed by peer")


class TrainingFailed(RuntimeError):
    """Training ended with an error; the message is the reason found in its log."""


def train(
    launch: Sequence[str],
    report_file: Path,
    log_file: Path,
    on_step: Callable[[StepReport], None],
    num_processes: int = 2,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run Megatron under torchrun until it ends by itself.

    Args:
        launch: Arguments of ``megatron_dynbatch.run --cpu``: a script and its flags.
        report_file: What ``--step-report`` names in them.
        log_file: Gets everything that the processes print.
        on_step: Called once for each step, in order, soon after it ran.
        num_processes: Ranks.
        environment: Variables to set besides those of this process.

    Raises:
        TrainingFailed: A process ended with an error.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={num_processes}",
        "-m", "megatron_dynbatch.run", "--cpu", *launch,
    ]  # fmt: skip
    variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=variables
        )
        try:
            for report in _follow(process, report_file):
                on_step(report)
        finally:
            if process.poll() is None:
                process.terminate()
            code = process.wait()
    if code != 0:
        raise TrainingFailed(f"{_reason(log_file)} (the whole log is in {log_file})")


def _follow(process: subprocess.Popen[bytes], report_file: Path) -> Iterator[StepReport]:
    """Reports as they appear, until the process has ended."""
    seen = 0
    since = last_line = time.monotonic()
    while True:
        ended = process.poll() is not None
        reports = read_step_reports(report_file) if report_file.exists() else []
        yield from reports[seen:]
        if len(reports) > seen:
            seen = len(reports)
            since = last_line = time.monotonic()
        if ended:
            return
        if time.monotonic() - last_line > _WAITING_LINE_SECONDS:
            last_line = time.monotonic()
            what = "Megatron" if seen else "Megatron to start"
            print(f"  ... waiting for {what} ({last_line - since:.0f} s)", flush=True)
        time.sleep(_POLL_SECONDS)


def _reason(log_file: Path) -> str:
    found = [m[1] for line in log_file.open(errors="replace") if (m := _REASON.match(line))]
    reasons = [line for line in found if not any(name in line for name in _NOT_THE_REASON)]
    return (reasons or found or ["a process ended without saying why"])[0]

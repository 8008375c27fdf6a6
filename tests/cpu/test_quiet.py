"""What people see of a run: their own lines, the plugin's, and everything that went wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynbatch.quiet import FOLDER, Sieve, log_folder
from megatron_dynbatch.report import StepReport
from megatron_dynbatch.report.step_line import step_line
from tests.pool import ROOT

MEGATRON = """
import logging, sys, warnings

def print_rank_0(text):
    print(text)

def start(show_iteration=True):
    print("using torch.float32 for parameters ...")
    print("  check_for_nan_in_loss_and_grad .................. True")
    print("  exit_on_missing_checkpoint ...................... False")
    warnings.warn("Apex is not installed.")
    logging.getLogger("megatron.core").warning("GPTModel IS DEPRECATED.")
    print(" iteration        3/       9 | lm loss: 4.0 |")
    logging.getLogger("megatron.core").error("a rank is gone")
    print("WARNING: could not find the metadata file; will not load any checkpoint")
    print(" validation loss at iteration 3 | lm loss value: 4.1")
    sys.stderr.write("Unexpected error: too few samples\\n")

def fail():
    print("setting training iterations to 3")
    raise RuntimeError("the model is too large")
"""
SCRIPT = """
import sys, types, warnings
fake = types.ModuleType("megatron.fake")
exec(compile(MEGATRON, "fake.py", "exec"), fake.__dict__)
fake.start()
fake.print_rank_0("reward of the script: 0.7")
warnings.warn("a warning of the script")
print("a line of the script")
fake.fail()
"""
HIDDEN = (
    "using torch.float32", "check_for_nan", "exit_on_missing", "Apex is not", "IS DEPRECATED",
    "setting training iterations",
)  # fmt: skip
SHOWN = (
    "iteration        3/", "a rank is gone", "could not find the metadata", "validation loss at",
    "Unexpected error", "reward of the script", "a warning of the script", "a line of the script",
    "Traceback (most recent call last)", "RuntimeError: the model is too large",
)  # fmt: skip


def run(tmp_path: Path, *options: str) -> tuple[str, str]:
    """(what is printed, Megatron's file) of a script that fails at the end."""
    (tmp_path / "script.py").write_text(f"MEGATRON = {MEGATRON!r}\n{SCRIPT}")
    code = (
        "import sys\nfrom megatron_dynbatch import run\nrun.prepare = lambda cpu: None\n"
        "sys.exit(run.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *options, "script.py", "--save", "out"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    log = tmp_path / "out" / FOLDER / "rank-0.log"
    return done.stdout + done.stderr, log.read_text() if log.exists() else ""


def test_megatrons_lines_are_in_the_file_and_every_error_is_shown(tmp_path: Path) -> None:
    printed, log = run(tmp_path)
    assert [text for text in HIDDEN if text in printed] == []
    assert [text for text in SHOWN if text not in printed] == []
    assert [text for text in HIDDEN if text not in log] == []
    # Where the file is stands at the beginning, and again after a failure.
    assert printed.count(f"Megatron's own lines: out/{FOLDER}/rank-0.log") == 2


def test_verbose_shows_everything(tmp_path: Path) -> None:
    printed, log = run(tmp_path, "--verbose")
    assert [text for text in HIDDEN + SHOWN if text not in printed] == []
    assert log == "" and "Megatron's own lines" not in printed


def test_without_a_file_everything_is_shown(tmp_path: Path) -> None:
    (tmp_path / "full").write_text("")  # no folder can be made there
    printed, _ = run(tmp_path, "--log-dir", "full")
    assert [text for text in HIDDEN + SHOWN if text not in printed] == []
    assert "Megatron's lines are shown: " in printed


def test_a_full_disk_loses_no_line() -> None:
    shown, hidden = io.StringIO(), io.StringIO()
    hidden.close()
    names = {"__name__": "megatron.core.x", "out": Sieve(shown, hidden)}
    exec("print('only in the file', file=out)", names)
    assert shown.getvalue() == "only in the file\n"


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["--save", "a", "--step-report", "b/steps.jsonl"], Path("b") / FOLDER),
        (["--save=a"], Path("a") / FOLDER),
    ],
)
def test_the_file_lies_with_the_results(arguments: list[str], folder: Path) -> None:
    assert log_folder(arguments) == folder


def test_the_line_of_a_step() -> None:
    values = dict.fromkeys(StepReport.__dataclass_fields__, 0) | {
        "iteration": 6, "step_global_batch_size": 1, "num_samples": 3, "num_microbatches": 1,
        "fill": 0.914, "consumed_rollouts": 45, "learning_rate": 0.001, "grad_norm": 0.5,
        "metrics": {"pg_loss": 1.0, "loss": 2.25}, "step_time": 1.24, "wait_time": 0.3,
        "skipped": False,
    }  # fmt: skip
    report = StepReport(**values)  # type: ignore[arg-type]
    assert step_line(report, num_rollouts=60) == (
        "step 6: loss 2.25, 1 rollout (45 of 60 trained), 3 samples in 1 micro-batch per rank, "
        "fill 91%, grad norm 0.5, lr 0.001, 1.2 s (0.3 s waiting)"
    )
    assert step_line(report, num_steps=9).startswith("step 6 of 9: loss 2.25, 1 rollout (45 tra")

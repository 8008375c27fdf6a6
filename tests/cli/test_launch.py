"""The launcher in processes of its own: torchrun, modules, Megatron's parser, spawn, a debugger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynbatch.report import read_step_reports
from tests.cpu.training import SCRIPT, TINY
from tests.parity.rollouts import STEP_SIZES, batch_flags, make_steps, write_batches
from tests.pool import ROOT

pytestmark = pytest.mark.slow

PROBE = """
import json, multiprocessing, sys
from pathlib import Path
import neighbour

def square(x):
    return x * x, __name__, "megatron_dynbatch.run" in sys.modules

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply(square, (7,))
    here = {"child": child, "argv": sys.argv[1:], "neighbour": neighbour.__file__}
    print("PROBE" + json.dumps(here))
"""


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment, cwd=cwd, capture_output=True, text=True, timeout=240,
    )


def test_torchrun_trains_a_module(tmp_path: Path) -> None:
    write_batches(tmp_path / "rollouts", make_steps())
    report = tmp_path / "steps.jsonl"
    flags = {**batch_flags(tmp_path / "rollouts"), "step-report": report}
    argv = [text for name, value in flags.items()
            for text in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]
    tiny = _without(TINY, "--global-batch-size", "--train-iters")
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "-m", "megatron_dynbatch.run", "--cpu", "--module", "examples.pretrain_gpt_sft",
               *tiny, *argv)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [one.step_global_batch_size for one in read_step_reports(report)]
    assert sizes == list(STEP_SIZES)


def _without(argv: list[str], *names: str) -> list[str]:
    kept = list(argv)
    for name in names:
        at = kept.index(name)
        del kept[at : at + 2]
    return kept


def test_wrong_options_are_told_by_megatrons_own_parser() -> None:
    done = run("-m", "megatron_dynbatch.cli.main", "run", "--cpu", str(SCRIPT), *TINY, "--no-such")
    assert done.returncode == 2
    assert "error: unrecognized arguments: --no-such" in done.stderr
    assert "--dynamic-global-batch" in done.stderr  # our flags are in its usage
    assert "Traceback" not in done.stderr


def test_children_and_neighbours_are_found_under_a_debugger(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "probe.py").write_text(PROBE)
    (scripts / "neighbour.py").write_text("")
    done = run("-m", "pdb", "-c", "continue", "-m", "megatron_dynbatch.run", "--cpu",
               "scripts/probe.py", "--lr", "1", cwd=tmp_path)
    line = next(line for line in done.stdout.splitlines() if line.startswith("PROBE"))
    found = json.loads(line.removeprefix("PROBE"))
    # The child imports the script as any spawned child does, without starting it again.
    assert found["child"] == [49, "__mp_main__", False]
    assert found["argv"] == ["--lr", "1"]
    assert Path(found["neighbour"]) == scripts / "neighbour.py"

"""The launcher: what the script sees, and what the user sees when the command is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynbatch import run
from megatron_dynbatch.run import Launch, main, parse_launch, run_target
from tests.cpu.training import SCRIPT, TINY
from tests.pool import ROOT

PROBE = """
import json, sys
print(json.dumps({"argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__,
                  "main": sys.modules["__main__"].__dict__ is globals()}))
"""


def directly(*command: str, cwd: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def through_launcher(
    launch: Launch, cwd: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, object]:
    monkeypatch.chdir(cwd)
    # What python -m puts there.
    monkeypatch.setattr(sys, "path", [str(cwd), *sys.path])
    before = list(sys.argv), list(sys.path)
    run_target(launch)
    assert (sys.argv, sys.path) == before
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("is_module", [False, True])
def test_script_sees_what_a_direct_start_shows(
    is_module: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "probe.py").write_text(PROBE)
    arguments = ("--cpu", "--lr", "1", "--module=x")
    if is_module:
        launch = Launch("scripts.probe", True, arguments, cpu=False)
        want = directly("-m", "scripts.probe", *arguments, cwd=tmp_path)
    else:
        launch = Launch("scripts/probe.py", False, arguments, cpu=False)
        want = directly("scripts/probe.py", *arguments, cwd=tmp_path)
    got = through_launcher(launch, tmp_path, monkeypatch, capsys)
    if not is_module:  # python makes a script's path absolute, runpy leaves it as typed
        got["file"] = os.path.abspath(str(got["file"]))
    assert got == want


def test_options_stand_before_the_script(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()
    assert parse_launch(["--cpu", str(script), "--cpu"]) == Launch(
        str(script), False, ("--cpu",), cpu=True
    )
    assert parse_launch(["--module", "a.b", "-h"]) == Launch("a.b", True, ("-h",), cpu=False)
    assert parse_launch(["--module=a.b"]) == Launch("a.b", True, (), cpu=False)
    assert parse_launch(["-h"]) is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no script given"),
        (["--gpu", "x.py"], "unknown option '--gpu' before the script"),
        (["nowhere.py"], "no file 'nowhere.py'"),
        (["--module"], "--module needs"),
    ],
)
def test_wrong_command_is_one_clear_sentence(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_the_command_trains_a_script_that_knows_nothing_of_us() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron_dynbatch.run", "--cpu", str(SCRIPT), *TINY]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "iteration        3/       3 | consumed samples:           12" in done.stdout


def test_hooks_find_the_megatron_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text("")
    seen: list[tuple[bool, str, list[str]]] = []
    monkeypatch.setattr(run, "prepare", lambda cpu: seen.append((cpu, sys.path[0], sys.argv[:])))
    script = str(tmp_path / "script.py")
    assert main(["--cpu", script, "--lr", "1"]) == 0
    assert seen == [(True, str(tmp_path), [script, "--lr", "1"])]

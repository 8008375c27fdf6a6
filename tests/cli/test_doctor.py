"""doctor: what it sees in the installed Megatron, in a patched one, and beside other plugins."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.cli import doctor, source_patch
from megatron_dynbatch.cli.environment import Check
from megatron_dynbatch.cli.main import main
from megatron_dynbatch.cli.sites import installed_root
from megatron_dynbatch.cli.tree import Tree
from megatron_dynbatch.hooks.registry import SITES
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from tests.pool import ROOT, run_ranks

FLAGS = ("--dynamic-global-batch --rollout-path there --rollouts-per-step 4 "
         "--max-tokens-per-gpu 64 --num-layers 2 "
         "--attention-dropout 0 --hidden-dropout 0").split()  # fmt: skip
WRAPPER = """
from megatron.training import training
kept = training.train_step
def logged_step(*args, **kwargs):
    return kept(*args, **kwargs)
training.train_step = logged_step
training.training_log = lambda *args, **kwargs: None
"""


def _in_rank(arguments: tuple[str, ...], folder: str) -> tuple[int, dict[str, Any]]:
    sys.path.insert(0, folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["doctor", "--json", *arguments])
    return code, json.loads(out.getvalue())


def run(*arguments: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a doctor in a process that has just imported Megatron."""
    (answer,) = run_ranks(1, _in_rank, arguments, str(folder), process_group=False)
    return answer


def run_in_tree(*arguments: str, tree: Path) -> tuple[int, dict[str, Any]]:
    """The same with another Megatron."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dynbatch.cli.main", "doctor", "--json", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def by_name(section: list[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {line["name"]: line for line in section}


def flags_at(path: Path) -> list[str]:
    """`FLAGS` with a rollout path that is there."""
    return [str(path) if word == "there" else word for word in FLAGS]


def test_a_good_installation_and_command_line(tmp_path: Path) -> None:
    flags = flags_at(tmp_path)
    code, report = run("--cpu", "--", *flags, "--my-own-option", "1", folder=tmp_path)
    assert (code, report["ok"]) == (0, True)
    environment = by_name(report["environment"])
    root = installed_root()
    assert root is not None
    assert environment["megatron-core"]["found"] == f"{Tree(root).label} ({root.resolve()}), tested"
    assert {"torch", "CUDA", "transformer-engine", "apex", "ray"} <= environment.keys()
    assert environment["reduction kernels"]["found"].startswith("torch implementation")
    expected = {found.site.name: found for found in Tree(root).find_sites()}
    for site in SITES:
        numbers = ",".join(str(node.lineno) for node in expected[site.name].nodes)
        found = by_name(report["sites"])[site.name]["found"]
        assert found.startswith("matched; ") and found.endswith(f".py:{numbers}")
    assert by_name(report["command line"])["--dynamic-global-batch"]["found"] == (
        "nothing is refused"
    )
    lines = by_name(report["command line"])
    assert lines["self-attention"]["found"] == (
        "attention; docs/parity.md: CP2; megatron-core 0.16 and newer"
    )
    # Six traits, each with each: attention, positions, reduction, ranks, width, optimizer.
    assert lines["pairs"]["found"] == "15 of 15 have a row in docs/parity.md"
    assert lines["batch-keys"]["found"] == (
        "script; looked at in the first step: a script that asks its batch for other keys"
    )
    found = by_name(report["command line"])["--rollout-path"]["found"]
    assert found == f"{tmp_path}: no batch is there yet"


def test_what_is_at_the_rollout_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme").write_text("")
    RolloutDirectory(tmp_path / "rollouts").write([Sample([1, 2], response_length=1)])
    for name, found, problem in (
        ("none", "there is no such directory", "is it the writer's?"),
        ("file", "is a file", "is it the writer's?"),
        ("other", "cannot be used", "is not a rollout directory: it holds 'readme'"),
        ("rollouts", "batches are there", None),
    ):
        check = doctor.rollout_path(str(tmp_path / name))
        assert found in check.found
        assert problem in check.problem if problem else check.problem is None  # type: ignore[operator]
    assert doctor.rollout_path(str(tmp_path / "none"), may_come=True).problem is None
    assert doctor.rollout_path("queue:run").problem is None


def test_without_torch_it_lists_what_is_missing(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from megatron_dynbatch.cli.main import main\n"
        "sys.exit(main(['doctor', '--cpu', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    environment = by_name(json.loads(done.stdout)["environment"])
    assert "pip install 'megatron-dynbatch[torch]'" in environment["torch"]["problem"]
    assert environment["CPU runner"]["problem"] is not None
    assert environment["numpy"]["problem"] is None and environment["pyarrow"]["problem"] is None


def test_other_plugins_and_refused_flags_are_named(tmp_path: Path) -> None:
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    code, report = run("--import", "wrapper", folder=tmp_path)
    assert (code, report["ok"]) == (1, False)
    sites = by_name(report["sites"])
    wrapped = sites["scheduler increment"]
    assert "matched, wrapped by wrapper.logged_step (" in wrapped["found"]
    assert f"{tmp_path}/wrapper.py:4)" in wrapped["found"] and wrapped["problem"] is None
    assert "training_log was replaced by wrapper.<lambda>" in sites["logged batch size"]["problem"]


@pytest.mark.slow
def test_a_patched_tree_is_recognised(tmp_path: Path) -> None:
    root = installed_root()
    assert root is not None
    shutil.copytree(root / "megatron", tmp_path / "tree" / "megatron")
    for name, text in source_patch.patched(Tree(root)).items():
        (tmp_path / "tree" / Tree(root).module(name).file).write_text(text)
    code, report = run_in_tree(
        "--", *FLAGS, "--perform-rl-step", "--rampup-batch-size", "1", "1", "1",
        tree=tmp_path / "tree",
    )  # fmt: skip
    lines = report["sites"] + report["seams"]
    assert lines and all(line["found"].startswith("in the source; ") for line in lines)
    assert code == 1
    refused = {line["name"]: line["problem"] for line in report["command line"]}
    assert refused["--perform-rl-step"] == (
        "--perform-rl-step: it has its own data and batch sizes"
    )
    assert "--rampup-batch-size" in refused


@pytest.mark.parametrize("problems", [0, 2])
def test_text_and_exit_code(
    problems: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [Check(f"part {n}", "broken", f"mend part {n}") for n in range(problems)]
    report = {"environment": [Check("torch", "9.9"), *bad]}
    monkeypatch.setattr(doctor, "examine", lambda *arguments: report)
    assert main(["doctor"]) == (1 if problems else 0)
    out = capsys.readouterr().out
    assert "ok  torch" in out and "9.9" in out
    assert f"{problems} problems" in out
    assert out.count("!!") == problems
    if problems:
        assert "  1. mend part 0\n  2. mend part 1" in out


def test_a_plugin_that_cannot_be_imported_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "environment", lambda: [])
    assert main(["doctor", "--import", "no_such_plugin"]) == 2
    assert "--import no_such_plugin: No module named" in capsys.readouterr().err


def test_latent_attention_of_local_layers_is_refused_under_tensor_parallelism(
    tmp_path: Path,
) -> None:
    flags = "--multi-latent-attention --position-embedding-type rope --transformer-impl local"
    parallel, common = "--tensor-model-parallel-size 2", flags_at(tmp_path)
    code, report = run("--cpu", "--", *common, *f"{flags} {parallel}".split(), folder=tmp_path)
    (problem,) = [line["problem"] for line in report["command line"] if line["problem"]]
    assert code == 1 and "lose a part of the gradient" in problem
    assert run("--cpu", "--", *common, *flags.split(), folder=tmp_path)[0] == 0


def test_a_pair_that_is_refused_is_named(tmp_path: Path) -> None:
    more = ("--optimizer", "sgd", "--use-distributed-optimizer")
    code, report = run("--cpu", "--", *flags_at(tmp_path), *more, folder=tmp_path)
    lines = by_name(report["command line"])
    assert code == 1
    assert lines["distributed-optimizer+sgd"]["found"] == "pair; refused"
    (problem,) = [line["problem"] for line in report["command line"] if line["problem"]]
    assert problem.startswith("--use-distributed-optimizer with --optimizer sgd: no parity test")
    assert lines["pairs"]["found"] == "20 of 21 have a row in docs/parity.md"
    assert run("--cpu", "--", *flags_at(tmp_path), *more, "--admit-unproven",
               "sgd+distributed-optimizer", folder=tmp_path)[0] == 0  # fmt: skip


OLDER = ROOT / ".venv" / "megatron-core-0.18.2"


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.is_dir(), reason=f"there is no {OLDER}")
def test_a_trait_without_a_row_for_an_older_megatron_is_refused(tmp_path: Path) -> None:
    flags = [*flags_at(tmp_path), "--num-experts", "4", "--moe-z-loss-coeff", "0.1"]
    code, report = run_in_tree("--cpu", "--", *flags, tree=OLDER)
    assert code == 1
    refused = {line["name"]: line["problem"] for line in report["command line"]}
    for flag in ("--num-experts", "--moe-z-loss-coeff"):
        assert refused[flag] == (
            f"{flag}: its row in docs/parity.md stands for megatron-core 0.19 and newer, this is "
            "0.18; take that version, or another option"
        )
    assert run_in_tree("--cpu", "--", *flags_at(tmp_path), tree=OLDER)[0] == 0

"""Judge one mutant: plant it in a copy of the tree, and see whether the mapped tests notice.

Every run of pytest is a fork of a process that has imported torch, Megatron's core and the package
already; only what holds on to the mutated module is imported anew. So it costs what its tests cost.
What "noticed" means is strict, so that a mutant which is killed once is killed each time, however
busy the machine is:

* a test must fail twice, one time after the other;
* property tests draw the same examples each time (the hypothesis profile of tests/conftest.py);
* an endless loop is noticed by the processor time it took, which load does not change;
* tests that wait for ever are ended, and have noticed nothing.
"""

from __future__ import annotations

import compileall
import gc
import importlib
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.imports import dependents, module_name
from tests.mutants.operators import Mutant
from tests.mutants.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_dynbatch"
MOST_PROCESSOR_SECONDS = 120
"""Of one process; every stage takes a tenth of that without a fault."""
MOST_SECONDS = 900.0
PREPARED = (
    "numpy", "torch", "hypothesis", "pytest", "_pytest.runner",
    "megatron.core.packed_seq_params", "megatron.core.utils",
)  # fmt: skip
"""What is imported once, before all forks; nothing of ours."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        key: Of the mutant.
        noticed: The test that fails, "" for a survivor.
        seconds: What it took.
    """

    key: str
    noticed: str
    seconds: float


def prepare() -> None:
    """Import what all forks need."""
    for name in PREPARED:
        importlib.import_module(name)


def prepare_in(tree: Path) -> None:
    """Import the package of a copy of the tree, without a fault."""
    os.chdir(tree)
    os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
    # Plugins cost as much as the tests; what ours need of hypothesis is in tests/conftest.py.
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", HYPOTHESIS_PROFILE="mutants")
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for file in TARGETS:
        importlib.import_module(module_name(Path(PACKAGE) / file))
    gc.freeze()


def forget(names: Collection[str]) -> None:
    """Have modules imported anew when they are asked for next."""
    for name in names:
        package, _, own = name.rpartition(".")
        if sys.modules.pop(name, None) is not None and package in sys.modules:
            vars(sys.modules[package]).pop(own, None)


def tree_files() -> list[str]:
    """The tracked files and those git would not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    return sorted(name for name in listed if name and (ROOT / name).is_file())


def copy_of_the_tree(folder: Path) -> Path:
    """`tree_files` and the same environment, so that the working tree is never touched."""
    for name in tree_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").unlink(missing_ok=True)
    (folder / ".venv").symlink_to((ROOT / ".venv").resolve())
    for part in (PACKAGE, "tests"):
        compileall.compile_dir(folder / part, quiet=2)
    # Bytecode of another mutant that was written in the same second would be taken for this one's.
    for file in TARGETS:
        Path(importlib.util.cache_from_source(str(folder / PACKAGE / file))).unlink()
    return folder


class FailingTwice:
    """A plugin of pytest: a test fails if it fails twice; the first that does is written down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        from _pytest.runner import runtestprotocol

        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if any(report.failed for report in reports):
            item._initrequest()
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self.path.read_text():
            self.path.write_text(report.nodeid)


def failing_test(tree: Path, arguments: Sequence[str], changed: Collection[str] = ()) -> str:
    """The first test that fails in a child process, "" if all pass (or wait for ever).

    Args:
        tree: A copy of the tree, which this process has imported.
        arguments: Of pytest: what to run.
        changed: Modules to import anew.
    """
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        try:
            _test_in_child(tree, arguments, changed)
        finally:
            os._exit(70)
    deadline = time.monotonic() + MOST_SECONDS
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return ""
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == 5:
        raise RuntimeError(f"pytest found no tests: {arguments}")
    if code == 0:
        return ""
    return (tree / "first-failure").read_text() or f"{arguments[0]} ended with exit code {code}"


def _test_in_child(tree: Path, arguments: Sequence[str], changed: Collection[str]) -> None:
    """Run pytest on the copy's modules, and leave with its exit code."""
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (MOST_PROCESSOR_SECONDS, MOST_PROCESSOR_SECONDS))
    forget(changed)
    forget([name for name in sys.modules if name.partition(".")[0] == "tests"])
    log = os.open(tree / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    fixed = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    code = pytest.main([*fixed, *arguments], plugins=[FailingTwice(tree / "first-failure")])
    sys.stdout.flush()
    os._exit(int(code))


def judge(tree: Path, mutant: Mutant) -> Verdict:
    """Run the target's stages until a test fails, twice."""
    file = tree / PACKAGE / mutant.file
    original = file.read_text(encoding="utf-8")
    changed = dependents(tree, PACKAGE, mutant.file)
    began = time.monotonic()
    file.write_text(mutant.source, encoding="utf-8")
    try:
        stages = TARGETS[mutant.file]
        noticed = next(filter(None, (failing_test(tree, s, changed) for s in stages)), "")
    finally:
        file.write_text(original, encoding="utf-8")
    return Verdict(mutant.key, noticed, time.monotonic() - began)

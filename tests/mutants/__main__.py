"""``python -m tests.mutants``: plant one small fault after the other, and see fast tests fail.

Each mutant lives in a copy of the tracked files, so the working tree is never touched. A process
that has imported torch forks for every mutant and runs pytest in it; the first failure kills the
mutant. Whole runs write benchmarks/results/mutants.md; ``--sample N`` takes N mutants chosen by
the commit, prints them, and fails on a survivor that the page does not have.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.targets import EQUIVALENT, TARGETS

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_dynbatch"
PAGE = ROOT / "benchmarks" / "results" / "mutants.md"
MOST_SECONDS = 300.0
"""A mutant whose tests take longer hangs, and is noticed by that."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: where tests noticed it; `noticed` is "" for a survivor."""

    mutant: Mutant
    noticed: str
    seconds: float


def all_mutants(only: str) -> list[Mutant]:
    """Of every target whose path contains `only`, but those that are known to be equivalent."""
    found = [
        mutant
        for file in TARGETS
        if only in file
        for mutant in mutants_of(file, (ROOT / PACKAGE / file).read_text(encoding="utf-8"))
    ]
    stale = {key for key in EQUIVALENT if only in key.split()[0]} - {m.key for m in found}
    if stale:
        sys.exit(f"EQUIVALENT has keys of no mutant: {sorted(stale)}")
    return [mutant for mutant in found if mutant.key not in EQUIVALENT]


def copy_of_the_tree(folder: Path) -> Path:
    """The tracked files and those git would not ignore, and the same environment."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").unlink(missing_ok=True)
    (folder / ".venv").symlink_to((ROOT / ".venv").resolve())
    return folder


def run_tests(tree: Path, arguments: Sequence[str]) -> str:
    """ "" if the tests pass in a child process, else what ended them."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        try:
            _test_in_child(tree, arguments)
        finally:
            os._exit(70)
    deadline = time.monotonic() + MOST_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no end within {MOST_SECONDS:g} s"
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    if code == 5:
        sys.exit(f"pytest found no tests: {arguments}")
    return "" if code == 0 else f"exit code {code}"


def _test_in_child(tree: Path, arguments: Sequence[str]) -> None:
    """Run pytest on the copy's modules, and leave with its exit code."""
    import pytest

    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in [n for n in sys.modules if n.partition(".")[0] in ("tests", PACKAGE)]:
        del sys.modules[name]
    log = os.open(tree / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    fixed = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "no-shrinking"]
    fixed += ["-m", "not slow"]
    code = pytest.main([*fixed, *arguments])
    sys.stdout.flush()
    os._exit(int(code))


def judge(tree: Path, mutant: Mutant) -> Verdict:
    """Run the target's stages until one fails."""
    file = tree / PACKAGE / mutant.file
    original = file.read_text(encoding="utf-8")
    began = time.monotonic()
    file.write_text(mutant.source, encoding="utf-8")
    try:
        for stage in TARGETS[mutant.file]:
            if run_tests(tree, stage):
                return Verdict(mutant, stage[0], time.monotonic() - began)
        return Verdict(mutant, "", time.monotonic() - began)
    finally:
        file.write_text(original, encoding="utf-8")


def judge_all(mutants: Sequence[Mutant]) -> list[Verdict]:
    """One worker's share, in a copy of its own; the tests must pass without a fault first."""
    import numpy  # noqa: F401 - imported once, before all forks
    import torch  # noqa: F401

    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = copy_of_the_tree(Path(folder))
        for file in dict.fromkeys(mutant.file for mutant in mutants):
            for stage in TARGETS[file]:
                if run_tests(tree, stage):
                    sys.exit(f"{stage} fails without a fault:\n{(tree / 'last.log').read_text()}")
        for mutant in mutants:
            verdict = judge(tree, mutant)
            verdicts.append(verdict)
            state = "killed  " if verdict.noticed else "SURVIVES"
            print(f"{state} {verdict.seconds:5.1f} s  {mutant.key}", flush=True)
    return verdicts


def chosen(mutants: list[Mutant], sample: int | None, seed: str) -> list[Mutant]:
    """All of them, or a sample that depends on the seed alone, in the files' order."""
    if sample is None or sample >= len(mutants):
        return mutants
    taken = set(random.Random(seed).sample(range(len(mutants)), sample))
    return [mutant for number, mutant in enumerate(mutants) if number in taken]


def commit() -> str:
    """Hash of the commit that is checked out."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or "no commit"


def page(verdicts: Sequence[Verdict], seed: str | None) -> str:
    """benchmarks/results/mutants.md; `seed` if only a sample was run."""
    survivors = [v.mutant for v in verdicts if not v.noticed]
    what = "every mutant" if seed is None else f"a sample of the mutants, seed `{seed}`"
    lines = [
        "# Mutants that the fast tests let through",
        "",
        "Written by `make mutants`. One small fault after the other is planted (another",
        "comparison, operator, number or branch, a call left out) and the mapped fast tests are",
        f"run (`tests/mutants/targets.py`). Here: {what}; slow tests do not count.",
        "",
        "| file | mutants | survivors | equivalent |",
        "|---|---|---|---|",
    ]
    for file in TARGETS:
        own = [v for v in verdicts if v.mutant.file == file]
        alive = sum(not v.noticed for v in own)
        same = sum(key.startswith(f"{file} ") for key in EQUIVALENT)
        lines.append(f"| {file} | {len(own)} | {alive} | {same} |")
    share = len(survivors) / max(len(verdicts), 1)
    lines += [f"| all | {len(verdicts)} | {len(survivors)} ({share:.1%}) | {len(EQUIVALENT)} |", ""]
    if survivors:
        lines += ["## Survivors", "", *(f"* `{m.key}`" for m in survivors), ""]
    if EQUIVALENT:
        lines += ["## Equivalent: no output can differ", ""]
        lines += [f"* `{key}`: {reason}" for key, reason in EQUIVALENT.items()] + [""]
    return "\n".join(lines)


def main() -> int:
    """1 if a survivor is not on the page yet (sample), or there are more than 5 % (whole run)."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--sample", type=int, metavar="N", help="this many, not all")
    parser.add_argument("--seed", default=commit(), help="of the sample; default: the commit")
    parser.add_argument("--only", default="", metavar="TEXT", help="files whose path has TEXT")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--write", action="store_true", help="write the page for a sample too")
    args = parser.parse_args()
    mutants = chosen(all_mutants(args.only), args.sample, args.seed)
    print(f"{len(mutants)} mutants" + (f", seed {args.seed}" if args.sample else ""), flush=True)
    if args.list:
        print("\n".join(f"{m.line:4d}  {m.key}" for m in mutants))
        return 0
    shares = [share for job in range(args.jobs) if (share := mutants[job :: args.jobs])]
    # Not a Pool: its daemons may not have children, which some tests start.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(max(len(shares), 1), context) as pool:
        verdicts = [verdict for share in pool.map(judge_all, shares) for verdict in share]
    verdicts.sort(key=lambda v: (list(TARGETS).index(v.mutant.file), v.mutant.line))
    survivors = [v.mutant.key for v in verdicts if not v.noticed]
    known = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    new = [key for key in survivors if f"`{key}`" not in known]
    is_whole = args.sample is None and not args.only
    if is_whole or args.write:
        text = page(verdicts, None if is_whole else args.seed)
        PAGE.write_text(text, encoding="utf-8")
    print(f"{len(survivors)} of {len(verdicts)} survive, {len(new)} of them are not in {PAGE.name}")
    return int(bool(new) if not is_whole else len(survivors) > 0.05 * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())

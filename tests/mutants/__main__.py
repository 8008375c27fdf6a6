"""``python -m tests.mutants``: plant one small fault after the other, and see fast tests fail.

Verdicts are kept in runs/mutants.jsonl, so that a run which was stopped goes on where it was, on
the same tree. A whole run writes benchmarks/results/mutants.md; ``--sample N`` judges N mutants
chosen by the commit, prints them, and fails on a survivor that the page does not have.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.mutants.judge import (
    PACKAGE,
    ROOT,
    Verdict,
    copy_of_the_tree,
    failing_test,
    judge,
    prepare,
    prepare_in,
)
from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.page import (
    PAGE,
    VERDICTS,
    Verdicts,
    digest_of_the_tree,
    page,
    survivors_on_the_page,
)
from tests.mutants.targets import EQUIVALENT, TARGETS


def all_mutants() -> list[Mutant]:
    """Of every target, but those that are known to be equivalent."""
    found = [
        mutant
        for file in TARGETS
        for mutant in mutants_of(file, (ROOT / PACKAGE / file).read_text(encoding="utf-8"))
    ]
    if stale := EQUIVALENT.keys() - {m.key for m in found}:
        sys.exit(f"EQUIVALENT has keys of no mutant: {sorted(stale)}")
    return [mutant for mutant in found if mutant.key not in EQUIVALENT]


def chosen(mutants: Sequence[Mutant], size: int, seed: str) -> list[Mutant]:
    """A sample that depends on the seed alone, in the files' order."""
    taken = set(random.Random(seed).sample(range(len(mutants)), min(size, len(mutants))))
    return [mutant for number, mutant in enumerate(mutants) if number in taken]


def commit() -> str:
    """Hash of the commit that is checked out."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return git.stdout.strip() or "no commit"


def _own_tree(folder: Path) -> Path:
    """This worker's copy of the tree, made at first use."""
    tree = folder / str(os.getpid())
    if not tree.exists():
        tree.mkdir()
        prepare_in(copy_of_the_tree(tree))
    return tree


def _judged(folder: Path, mutant: Mutant) -> Verdict:
    return judge(_own_tree(folder), mutant)


def _without_fault(folder: Path, stage: Sequence[str]) -> str:
    """ "" if the tests pass as they must, else which one fails, and its output."""
    tree = _own_tree(folder)
    failed = failing_test(tree, stage)
    return failed and f"{failed} fails without a fault:\n{(tree / 'last.log').read_text()}"


def judge_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    """Verdicts as they come; the tests must pass without a fault first."""
    prepare()
    files = dict.fromkeys(mutant.file for mutant in mutants)
    stages = dict.fromkeys(tuple(stage) for file in files for stage in TARGETS[file])
    # Not a Pool: its daemons may not have children, which some tests start.
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as name,
        ProcessPoolExecutor(jobs, context) as pool,
    ):
        folder = Path(name)
        try:
            checks = [pool.submit(_without_fault, folder, stage) for stage in stages]
            for check in as_completed(checks):
                if said := check.result():
                    sys.exit(said)
            for judged in as_completed([pool.submit(_judged, folder, m) for m in mutants]):
                yield judged.result()
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> int:
    """1 if a survivor is not on the page (sample), or there are more than 5 % (whole run)."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--sample", type=int, metavar="N", help="this many, not all")
    parser.add_argument("--seed", default=commit(), help="of the sample; default: the commit")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose key has TEXT")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    args = parser.parse_args()
    everything = all_mutants()
    mutants = [mutant for mutant in everything if args.only in mutant.key]
    if args.sample is not None:
        mutants = chosen(mutants, args.sample, args.seed)
        print(f"seed {args.seed}")
    print(f"{len(mutants)} mutants", flush=True)
    if args.list or args.sample is not None:
        print("\n".join(f"{m.line:4d}  {m.key}" for m in mutants), flush=True)
    if args.list:
        return 0
    verdicts = Verdicts(VERDICTS, digest_of_the_tree())
    # A sample is judged anew: it is there to see whether verdicts still hold.
    todo = [m for m in mutants if args.sample is not None or m.key not in verdicts.known]
    for number, verdict in enumerate(judge_all(todo, args.jobs) if todo else [], 1):
        verdicts.add(verdict)
        state = f"killed by {verdict.noticed}" if verdict.noticed else "SURVIVES"
        print(f"{number:3d}  {verdict.seconds:5.1f} s  {verdict.key}\n       {state}", flush=True)
    alive = [m.key for m in mutants if not verdicts.known[m.key].noticed]
    if mutants == everything:
        PAGE.write_text(page(mutants, verdicts.known), encoding="utf-8")
    new = sorted(set(alive) - survivors_on_the_page())
    print(f"{len(alive)} of {len(mutants)} survive, {len(new)} of them are not on {PAGE.name}")
    print("\n".join(f"  {key}" for key in new or alive))
    return int(bool(new) if mutants != everything else len(alive) > 0.05 * len(mutants))


if __name__ == "__main__":
    sys.exit(main())

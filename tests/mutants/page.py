"""benchmarks/results/mutants.md, and the verdicts that a run leaves for the next one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.mutants.judge import PACKAGE, ROOT, Verdict, tree_files
from tests.mutants.operators import Mutant
from tests.mutants.targets import EQUIVALENT, TARGETS

PAGE = ROOT / "benchmarks" / "results" / "mutants.md"
VERDICTS = ROOT / "runs" / "mutants.jsonl"


def digest_of_the_tree() -> str:
    """Of all that a verdict depends on: package, tests, and which of them are run."""
    digest = hashlib.sha256(repr(TARGETS).encode())
    for name in tree_files():
        if name.startswith((f"{PACKAGE}/", "tests/")) and not name.startswith("tests/mutants/"):
            digest.update(f"{name}\0".encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


class Verdicts:
    """What was judged on this tree; each verdict is kept as soon as it is there.

    Args:
        path: A file of JSON lines.
        tree: `digest_of_the_tree`; verdicts on other trees do not count.
    """

    def __init__(self, path: Path, tree: str) -> None:
        self._path = path
        self._tree = tree
        self.known: dict[str, Verdict] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            values = json.loads(line)
            if values.pop("tree") == tree:
                self.known[values["key"]] = Verdict(**values)

    def add(self, verdict: Verdict) -> None:
        """Remember a verdict, here and in the file."""
        self.known[verdict.key] = verdict
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"tree": self._tree, **asdict(verdict)}) + "\n")


def survivors_on_the_page() -> set[str]:
    """Keys that the page lists."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return {line[3:-1] for line in text.splitlines() if line.startswith("* `")}


def page(mutants: Sequence[Mutant], known: Mapping[str, Verdict]) -> str:
    """The page of a whole run: every mutant, judged on one tree."""
    alive = [m for m in mutants if not known[m.key].noticed]
    minutes = sum(known[m.key].seconds for m in mutants) / 60
    lines = [
        "# Mutants that the fast tests let through",
        "",
        "Written by `make mutants`. One small fault after the other is planted (another",
        "comparison, operator, number or branch, a call left out) and the mapped fast tests are",
        "run (`tests/mutants/targets.py`): unit tests; slow tests and whole trainings do not",
        "count. Every mutant was judged, all on the same tree, in",
        f"{minutes:.0f} minutes of one process (half of that with two).",
        "",
        "| file | mutants | survivors | equivalent |",
        "|---|---|---|---|",
    ]
    for file in TARGETS:
        own = sum(m.file == file for m in mutants)
        same = sum(key.startswith(f"{file} ") for key in EQUIVALENT)
        lines.append(f"| {file} | {own} | {sum(m.file == file for m in alive)} | {same} |")
    share = len(alive) / len(mutants)
    lines += [f"| all | {len(mutants)} | {len(alive)} ({share:.1%}) | {len(EQUIVALENT)} |", ""]
    if alive:
        lines += ["## Survivors", "", *(f"* `{m.key}`" for m in alive), ""]
    if EQUIVALENT:
        lines += ["## Equivalent: no output can differ", ""]
        lines += [f"* `{key}`: {reason}" for key, reason in EQUIVALENT.items()] + [""]
    return "\n".join(lines)

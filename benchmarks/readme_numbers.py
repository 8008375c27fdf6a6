"""``make readme-numbers``: every measured figure of README and docs, from the files of results.

The tested versions of Megatron, from `megatron_dynbatch/versions.py`, are figures too.

A figure stands between `<!--n:NAME-->` and `<!--/n-->`, which no reader sees; NAME is one of
`FIGURES`. ``--check`` changes nothing and ends with code 1 if a figure is not that of its file.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_dynbatch.versions import TESTED, TESTED_PACKAGES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"<!--n:([\w-]+)-->(.*?)<!--/n-->", re.DOTALL)
PACKERS = {
    "ours": "this planner",
    "ours, lock-step": "this planner, for ranks in lock-step",
    "first-fit + stride": "first-fit, dealt out in turns",
    "KK equal counts + FFD": "Karmarkar-Karp over ranks, then first-fit decreasing",
    "verl": "verl",
    "areal": "areal",
    "openrlhf": "openrlhf",
}


def pages() -> list[Path]:
    """Pages that have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _read(name: str) -> str:
    return (RESULTS / name).read_text(encoding="utf-8")


def _found(pattern: str, text: str) -> re.Match[str]:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no result looks like {pattern!r}")
    return match


def _throughput() -> Iterator[tuple[float, float, float]]:
    """Tokens per second of stock, first-fit and ours, for each layout and set of lengths."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    pattern = r"^\| (\w+) \| (\w+) \| (stock|first-fit|ours) \| ([\d.]+) \|"
    for layout, name, arm, rate in re.findall(pattern, _read("end_to_end.md"), re.M):
        rows.setdefault((layout, name), {})[arm] = float(rate)
    for arms in rows.values():
        yield arms["stock"], arms["first-fit"], arms["ours"]


def _span(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def throughput_padded() -> str:
    """Ours over padded stock batches."""
    return _span([ours / stock for stock, _, ours in _throughput()], 1)


def throughput_packed() -> str:
    """Ours over first-fit packing."""
    return _span([ours / packed for _, packed, ours in _throughput()], 2)


def hook_ratio() -> str:
    """CPU time with the plugin over stock, larger model."""
    return _found(r"median CPU time: ratio ([\d.]+)", _read("end_to_end.md"))[1]


def hook_microseconds() -> str:
    """CPU time of the plugin per micro-batch, small model."""
    return _found(r"(\d+) us per micro-batch with the smaller", _read("end_to_end.md"))[1]


def _bar() -> re.Match[str]:
    return _found(r"Bar at .*: ([\d.]+) × x @ w .*?, (\d+) × faster", _read("cpu.md"))


def packers() -> str:
    """A table of packers: means over all sets of lengths, sizes and ranks."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for line in _read("plan_quality.md").splitlines():
        name, numbers = line[:24].strip(), line[24:].split()
        if name in PACKERS and len(numbers) == 6:
            count, bound, balance, lockstep = map(float, numbers[:4])
            rows.setdefault(name, []).append((count / bound, balance, lockstep))
    lines = [
        "| packer | micro-batches over the bound | balance | lock-step |", "|---|---|---|---|"
    ]  # fmt: skip
    for name, label in PACKERS.items():
        means = [statistics.fmean(column) for column in zip(*rows[name], strict=True)]
        lines.append(f"| {label} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n\n" + "\n".join(lines) + "\n\n"


def packer_cases() -> str:
    """How many cases the table of packers is a mean of."""
    return str(len(re.findall(r"^ours  ", _read("plan_quality.md"), re.M)))


def plan_seconds() -> str:
    """The longest of the plans of 65,536 samples, over sets of lengths and ranks."""
    rows = re.findall(r"(?m)^\| 65,536 \| \d+ \| (.*) \| [\d.]+ \|$", _read("plan_speed.md"))
    return f"{max(float(seconds) for row in rows for seconds in row.split(' | ')):.2f}"


def _demo(row: str) -> str:
    return _found(rf"(?m)^\| {row} \| (.*) \|$", _read("demo.md"))[1]


def own_loop_lines() -> str:
    """Lines of the example with a loop of its own."""
    return str(len((ROOT / "examples" / "own_loop_mcore.py").read_text().splitlines()))


def _asynchronous(row: str, column: int) -> str:
    line = _found(rf"(?m)^\| {row}.*$", _read("asynchronous.md"))[0]
    return line.split("|")[column].strip()


def versions() -> str:
    """A table of the versions that were trained."""
    lines = [
        f"| megatron-core | {' | '.join(TESTED)} |",
        f"|---|{'---|' * len(TESTED)}",
        f"| training code from | {' | '.join(TESTED.values())} |",
    ]
    return "\n\n" + "\n".join(lines) + "\n\n"


FIGURES: dict[str, Callable[[], str]] = {
    "throughput-padded": throughput_padded,
    "throughput-packed": throughput_packed,
    "hook-ratio": hook_ratio,
    "hook-microseconds": hook_microseconds,
    "sums-ratio": lambda: f"{float(_bar()[1]):.1f}",
    "sums-loop": lambda: _bar()[2],
    "packers": packers,
    "packer-cases": packer_cases,
    "plan-seconds": plan_seconds,
    "demo-steps": lambda: _demo("steps"),
    "demo-sizes": lambda: _demo("rollouts per step"),
    "demo-before": lambda: _demo("mean reward, first fifth of the steps"),
    "demo-after": lambda: _demo("mean reward, last fifth"),
    "demo-dropped": lambda: _demo("samples that never train, if the rest is dropped"),
    "demo-torn": lambda: _demo("rollouts that lose samples or are torn in two"),
    "own-loop-lines": own_loop_lines,
    "versions": versions,
    "tested-packages": lambda: ", ".join(TESTED_PACKAGES),
    "async-turns": lambda: _asynchronous("0", 2),
    "async-ahead": lambda: _asynchronous("1", 2),
    "async-ratio": lambda: f"{float(_asynchronous('1', 2)) / float(_asynchronous('0', 2)):.2f}",
    "async-turns-all": lambda: _asynchronous("0", 3),
    "async-ahead-all": lambda: _asynchronous("1", 3),
}


def with_figures(text: str) -> str:
    """A page with every marked figure as its file has it.

    Raises:
        ValueError: A mark names no figure.
    """

    def figure(match: re.Match[str]) -> str:
        if match[1] not in FIGURES:
            raise ValueError(f"no figure is named {match[1]!r}; there are {', '.join(FIGURES)}")
        return f"<!--n:{match[1]}-->{FIGURES[match[1]]()}<!--/n-->"

    return MARKED.sub(figure, text)


def differences(text: str) -> list[str]:
    """Figures of a page that are not those of their files."""
    pairs = zip(MARKED.finditer(text), MARKED.finditer(with_figures(text)), strict=True)
    return [
        f"{before[1]}: {before[2].strip()!r} should be {after[2].strip()!r}"
        for before, after in pairs
        if before[2] != after[2]
    ]


def main() -> int:
    """Exit code 1 if something differs and --check was given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    found = False
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for line in differences(text):
            found = True
            print(f"{page.relative_to(ROOT)}: {line}")
        if not check:
            page.write_text(with_figures(text), encoding="utf-8")
    return int(found and check)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks.demo_results RUN``: the demo's figures for README, from its summary.json.

    make demo && python -m benchmarks.demo_results runs/demo

writes benchmarks/results/demo.md. The figures of the fixed batch follow from the sizes alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.readme_numbers import RESULTS

_TEXT = """\
# The demo

Written by `python -m benchmarks.demo_results` from the summary of `make demo`: seed {seed},
{layout}, on a machine with 2 cores and no GPU that did other work as well.

| | |
|---|---|
| steps | {steps} |
| rollouts | {rollouts:,} |
| rollouts per step | {smallest} to {largest} |
| mean reward, first fifth of the steps | {before:.2f} |
| mean reward, last fifth | {after:.2f} |
| seconds, warm-up included | {seconds:.0f} |

The same rollouts in a fixed batch of {fixed_size} samples:

| | |
|---|---|
| samples that never train, if the rest is dropped | {dropped:.0%} |
| rollouts that lose samples or are torn in two | {torn:.0%} |
| samples without a loss, if the rest is filled up | {padded_samples:,} |
"""


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the demo's --out")
    summary = json.loads((parser.parse_args().run / "summary.json").read_text(encoding="utf-8"))
    first, control = summary["seeds"][0], summary["control"]
    sizes = [step["G"] for step in first["steps"]]
    text = _TEXT.format(
        **control | {"steps": len(sizes), "rollouts": sum(sizes)},
        seed=first["seed"], layout=summary["layout"], smallest=min(sizes), largest=max(sizes),
        before=first["reward_first_fifth"], after=first["reward_last_fifth"],
        seconds=summary["seconds"], dropped=control["dropped_samples"] / control["samples"],
        torn=control["torn_rollouts"] / control["rollouts"],
    )  # fmt: skip
    (RESULTS / "demo.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""``megatron-dynbatch fit-cost``: the planner's cost model from measured times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DESCRIPTION = """\
Fits alpha, beta and gamma of the cost model to measured times: JSONL with a row per micro-batch,
{"lengths": [tokens of each sample], "seconds": time}. Prints the options for `plan`.
"""
EXAMPLES = """\
  megatron-dynbatch fit-cost times.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("times", type=Path, metavar="JSONL")


def run(args: argparse.Namespace) -> int:
    """Fit a cost model and print it as options."""
    from megatron_dynbatch.plan.model_cost import fit_cost

    micro_batches: list[list[int]] = []
    times: list[float] = []
    for number, line in enumerate(args.times.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            micro_batches.append([int(length) for length in row["lengths"]])
            times.append(float(row["seconds"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{args.times}, line {number}: {error!r}") from error
    cost = fit_cost(micro_batches, times)
    print(f"--cost-alpha {cost.alpha:g} --cost-beta {cost.beta:g} --cost-gamma {cost.gamma:g}")
    return 0

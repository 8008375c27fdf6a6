"""``megatron-dynbatch fit-cost``: the planner's cost model from measured times."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.plan import CostModel, Plan, padded_length
from megatron_dynbatch.plan.model_cost import fit_cost, fit_terms
from megatron_dynbatch.plan.step_time import predict
from megatron_dynbatch.wording import counted

if TYPE_CHECKING:
    from megatron_dynbatch.cli.report_data import RunData

DESCRIPTION = """\
Fits alpha, beta and gamma of the cost model to measured times and prints them as options of `plan`.
PATH is what a training left behind, the folder with the step reports (--step-report RUN_DIR/
steps.jsonl) and the rollout directory; or JSONL of your own measurements with a row per
micro-batch, {"lengths": [tokens of each sample], "seconds": time}.
"""
EXAMPLES = """\
  megatron-dynbatch fit-cost RUN_DIR
  megatron-dynbatch fit-cost times.jsonl"""

_FEWEST_STEPS = 8
# Times at so many times the usual rate, or so many median deviations off, are no measurements:
# a checkpoint, a start-up, another program.
_OUTLIER = 4.0
# Which path is critical depends on the coefficients, so a few fits follow each other.
_ROUNDS = 6
_NUDGE = 1e-6
_TOKENS = np.array([1.0, 0.0, 0.0])

Floats = NDArray[np.float64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("times", type=Path, metavar="PATH")
    parser.add_argument("--steps", type=Path, metavar="JSONL", help="the step reports of the run")
    parser.add_argument("--rollouts", type=Path, metavar="DIR", help="its rollout directory")


def run(args: argparse.Namespace) -> int:
    """Fit a cost model and print it as options."""
    if args.times.is_dir():
        cost = _from_run(args)
    elif args.times.is_file():
        cost = _from_rows(args.times)
    else:
        raise OptionError(f"{args.times}: there is neither a file nor a folder of a run")
    print(f"--cost-alpha {cost.alpha:g} --cost-beta {cost.beta:g} --cost-gamma {cost.gamma:g}")
    return 0


def _from_rows(path: Path) -> CostModel:
    micro_batches: list[list[int]] = []
    times: list[float] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            micro_batches.append([int(length) for length in row["lengths"]])
            times.append(float(row["seconds"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    return fit_cost(micro_batches, times)


def _from_run(args: argparse.Namespace) -> CostModel:
    from megatron_dynbatch.cli.report_data import read_run

    run = read_run(args.times, args.steps, args.rollouts)
    if run.rollouts is None:
        raise OptionError(
            f"{args.times} holds no rollout directory of these steps: name it with --rollouts"
        )
    steps, times = measured_steps(run)
    if len(times) < _FEWEST_STEPS:
        raise OptionError(
            f"{args.times}: {counted(len(times), 'step')} with a time and a plan; a fit needs "
            f"{_FEWEST_STEPS}"
        )
    # One long step would tilt a fit by squares, so the first look is at seconds per token.
    rates = times / np.array([step.seconds(_TOKENS) for step in steps])
    kept = np.abs(np.log(rates / np.median(rates))) < np.log(_OUTLIER)
    found = np.array([float(np.median(rates)), 0.0, 0.0])
    for number in range(_ROUNDS):
        table = np.array([step.terms(found) for step in steps])
        cost = fit_terms(table[kept], times[kept].tolist())
        found = np.array([cost.alpha, cost.beta, cost.gamma])
        if number == _ROUNDS // 2:
            off = _deviations(table, times, cost)
            kept &= off <= _OUTLIER * max(float(np.median(off[kept])), 1e-6)
    middle = float(np.median(_deviations(table[kept], times[kept], cost)))
    print(
        f"{counted(int(kept.sum()), 'step')}, {int((~kept).sum())} left out as outliers; half of "
        f"them within {middle:.0%} of the fit",
        file=sys.stderr,
    )
    return cost


class MeasuredStep:
    """A step of a plan whose time is known.

    Args:
        plan: Its plan.
        number: The step in it.
    """

    def __init__(self, plan: Plan, number: int) -> None:
        self._layout = plan.layout
        ranks = plan.steps[number].micro_batches
        lengths = padded_length(plan.index.total_lengths, plan.layout).astype(np.float64)
        self._grids = [
            np.array([[float(values[list(rows)].sum()) for rows in rank] for rank in ranks])
            for values in (lengths, lengths**2)
        ] + [np.ones((len(ranks), len(ranks[0])))]

    def seconds(self, coefficients: Floats) -> float:
        """What the step-time model says with these alpha, beta and gamma."""
        costs = sum(c * grid for c, grid in zip(coefficients, self._grids, strict=True))
        return predict(np.asarray(costs), self._layout).seconds

    def terms(self, coefficients: Floats) -> list[float]:
        """By what each coefficient is multiplied along the critical path, near these values."""
        base, found = self.seconds(coefficients), []
        for change in np.eye(3):
            change = change * (_NUDGE * base / self.seconds(change))
            found.append((self.seconds(coefficients + change) - base) / change.sum())
        return [float(term) for term in found]


def measured_steps(run: RunData) -> tuple[list[MeasuredStep], Floats]:
    """The steps that have a time and a plan, and their seconds without waiting.

    Args:
        run: Its reports, and the rollouts that they were planned from.
    """
    from megatron_dynbatch.cli.report_data import plan_of_step

    steps, times = [], []
    for report in run.reports:
        seconds = (report.step_time or 0.0) - (report.wait_time or 0.0)
        plan = plan_of_step(run, report) if seconds > 0 else None
        if plan is not None:
            steps.append(MeasuredStep(plan, report.step_index))
            times.append(seconds)
    return steps, np.array(times, dtype=np.float64)


def _deviations(table: Floats, times: Floats, cost: CostModel) -> Floats:
    """Relative, of each time from what the model says."""
    predicted = table @ np.array([cost.alpha, cost.beta, cost.gamma])
    return np.asarray(np.abs(times - predicted) / times)

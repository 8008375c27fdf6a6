"""What the runs of `verify` say together: deviations, verdicts, reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_dynbatch.cli.console import styled
from megatron_dynbatch.cli.verify_cells import Cell, Outcome
from megatron_dynbatch.cli.verify_factors import Factors, causes

GRADIENT = "gradient"
SMALLEST_SCALE = 0.01
"""Deviations of a metric are relative to its value, or to this if it is smaller."""

_EXPLAINED = {
    "packing": "it changes with the split into micro-batches: something is averaged per "
    "micro-batch, or divided by a count of one micro-batch",
    "dp": "it changes with data parallelism: something is divided by a count of one rank",
    "cp": "it changes with context parallelism: something is a count or a mean of one rank's "
    "part of the samples",
    "masked": "samples without a trained token change it: they are clamped into a denominator",
    "twice": "it changes when the step holds every rollout twice: it is a sum, or divided by a "
    "count of the step once more than the plugin does",
}
KINDS = tuple(_EXPLAINED)
_NAMED = {
    "packing": "the split into micro-batches",
    "siblings": "samples of one rollout in different micro-batches",
    "dp": "data parallelism",
    "cp": "context parallelism",
    "masked": "samples without a trained token",
    "twice": "every rollout twice",
}
_REMEDY = (
    "Return the sum of token weights times values and divide by nothing: microbatch.mean(x) in a "
    "loss with keyword `microbatch`, the plain masked sum in a stock one; report means likewise."
)


@dataclass
class Verdict:
    """What the runs said about one quantity.

    Attributes:
        name: "gradient", or a metric's.
        value: In the first step of the first cell; the gradient's is its norm.
        deviations: Cell → relative deviation from the first cell; infinite where it is missing.
        tolerance: Largest deviation that counts as equal.
    """

    name: str
    value: float
    deviations: dict[str, float]
    tolerance: float

    @property
    def invariant(self) -> bool:
        """Whether no cell deviates; NaN deviates."""
        return all(d <= self.tolerance for d in self.deviations.values())


@dataclass
class Verification:
    """The result of `verify`.

    Attributes:
        cells: The cells that were run, the reference first.
        verdicts: One for each quantity.
        changed: Cell → what its run changed against the reference.
        untested: What was to be tested and was not → why.
        errors: Cell → what its run failed with.
        notes: What was left out, and why.
    """

    cells: list[Cell]
    verdicts: list[Verdict] = field(default_factory=list)
    changed: dict[str, Factors] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def invariant(self) -> bool:
        """Whether every run succeeded and no quantity deviates anywhere."""
        return not self.errors and all(v.invariant for v in self.verdicts)

    @property
    def proves_it(self) -> bool:
        """Whether it is invariant and all that was to be tested was."""
        return self.invariant and not self.untested

    def reasons(self) -> list[str]:
        """Why not, one line for each change, or changes together, that matter."""
        wrong = {c for v in self.verdicts for c, d in v.deviations.items() if d > v.tolerance}
        order = list(_EXPLAINED)
        found = [sorted(cause, key=order.index) for cause in causes(self.changed, sorted(wrong))]
        return [_reason(cause) for cause in sorted(found, key=lambda c: [*map(order.index, c)])]


def _reason(cause: list[str]) -> str:
    if not cause:
        return "it changes between two equal runs: dropout, or something else that is random"
    if len(cause) == 1:
        return _EXPLAINED[cause[0]]
    together = " and ".join(_NAMED[kind] for kind in cause)
    return f"it changes where {together} come together, or by one of them: no run tells them apart"


def compare(outcomes: Mapping[str, Outcome], tolerance: float) -> list[Verdict]:
    """Deviations of gradient and metrics of every cell from the first."""
    (first, reference), *others = outcomes.items()
    names = dict.fromkeys(
        name for outcome in outcomes.values() for step in outcome.metrics for name in step
    )
    verdicts = [
        Verdict(
            GRADIENT,
            _gradient_norm(reference),
            {cell: _gradient_deviation(outcome, reference) for cell, outcome in others},
            tolerance,
        )
    ]
    for name in names:
        deviations = {cell: _metric_deviation(name, o, reference) for cell, o in others}
        value = reference.metrics[0].get(name, np.nan)
        verdicts.append(Verdict(name, value, deviations, tolerance))
    return verdicts


def _gradient_norm(outcome: Outcome) -> float:
    tensors = (t for part in outcome.gradients[0].values() for t in part.values())
    return float(np.sqrt(sum(float(t.square().sum()) for t in tensors)))


def _gradient_deviation(outcome: Outcome, reference: Outcome) -> float:
    """Largest ‖difference‖ / ‖reference‖ over the steps, over all parameters together."""
    if len(outcome.gradients) != len(reference.gradients):
        return np.inf
    worst = 0.0
    for ours, theirs in zip(outcome.gradients, reference.gradients, strict=True):
        difference, scale = 0.0, 0.0
        for place, tensors in theirs.items():
            for name, tensor in tensors.items():
                difference += float((ours[place][name] - tensor).square().sum())
                scale += float(tensor.square().sum())
        worst = _worse(worst, np.sqrt(difference / scale) if scale else np.inf)
    return worst


def _metric_deviation(name: str, outcome: Outcome, reference: Outcome) -> float:
    if len(outcome.metrics) != len(reference.metrics):
        return np.inf
    worst = 0.0
    for ours, theirs in zip(outcome.metrics, reference.metrics, strict=True):
        if name not in ours or name not in theirs:
            return np.inf
        a, b = ours[name], theirs[name]
        if a != b and not (np.isnan(a) and np.isnan(b)):
            worst = _worse(worst, abs(a - b) / max(abs(b), SMALLEST_SCALE))
    return worst


def _worse(one: float, other: float) -> float:
    return max(one, np.inf if np.isnan(other) else float(other))


def as_table(result: Verification) -> str:
    """Deviations by quantity and cell, then the verdict and what to do."""
    cells = [c for c in result.cells[1:] if c.name not in result.errors]
    lines = []
    if result.verdicts:
        width = max(len(v.name) for v in result.verdicts) + 2
        lines.append(f"\ndeviation from {result.cells[0].name!r}; = is at most the tolerance")
        lines.append(" " * width + "  ".join(["     value", *(c.name for c in cells)]))
        for v in result.verdicts:
            entries = [_entry(result, v, c).rjust(len(c.name)) for c in cells]
            lines.append(v.name.ljust(width) + "  ".join([f"{v.value:10.3g}", *entries]))
    if any(not result.changed.get(c.name) for c in cells):
        lines.append("-: this run's micro-batches and ranks are those of the first: not a test")
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"run {cell!r} failed: {error}" for cell, error in result.errors.items()]
    wrong = [v.name for v in result.verdicts if not v.invariant]
    if result.invariant:
        largest = max((d for v in result.verdicts for d in v.deviations.values()), default=0.0)
        word = styled("invariant", "green") if result.proves_it else "invariant as far as tested"
        lines.append(f"{word}: no quantity deviates by more than {largest:.1e}")
    elif wrong:
        lines.append(f"{styled('NOT invariant', 'bold red')}: {', '.join(wrong)}")
        lines += [f"  {reason}" for reason in result.reasons()]
        lines.append(_REMEDY)
    for kind, why in result.untested.items():
        lines.append(f"{styled('NOT tested', 'bold red')}: {_NAMED[kind]}: {why}")
    return "\n".join(lines)


def _entry(result: Verification, verdict: Verdict, cell: Cell) -> str:
    deviation = verdict.deviations[cell.name]
    if deviation > verdict.tolerance:
        return f"{deviation:.1e}"
    return "=" if result.changed.get(cell.name) else "-"

"""What the ways to run a step say together: deviations over all ranks, verdict, reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_dynbatch.cli.console import styled

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dynbatch.cli.model_runs import Measured
    from megatron_dynbatch.cli.model_variants import Variant

ALONE, PLAN, AGAIN, OTHER, DUMMIES = (
    "each alone", "the plan", "the plan again", "another packing", "more dummies",
)  # fmt: skip
LOSS, GRADIENT, WORST = "loss", "gradient", "worst parameter"
MOST_PARAMETERS = 5
# A parameter's deviation is relative to its gradient, or to this share of a typical one: those that
# have none but rounding (the bias of keys) are not compared with themselves.
SMALLEST_SHARE = 1e-3

type Deviations = dict[str, dict[str, float]]
"""Quantity → way → relative deviation."""


@dataclass
class ModelVerification:
    """The result of `verify --model`, the same on every rank.

    Attributes:
        values: Quantity → value by each sample alone, a metric's by the plan.
        deviations: From each sample alone; a metric's from the plan.
        noise: Quantity → deviation of two equal runs of the plan.
        from_plan: Quantity → deviation of the run with more dummies from the plan.
        parameters: (name, rank, way, deviation) of those that differ most.
        tolerance: Largest deviation that counts as equal.
        untested: What the step could not show, and why.
    """

    values: dict[str, float]
    deviations: Deviations
    noise: dict[str, float]
    from_plan: dict[str, float]
    parameters: list[tuple[str, int, str, float]]
    tolerance: float
    untested: list[str] = field(default_factory=list)

    def limit(self, quantity: str) -> float:
        """Largest deviation of a quantity that counts as equal: four times the noise, if small."""
        noise = self.noise[quantity]
        return max(self.tolerance, 4 * noise) if noise <= self.tolerance else self.tolerance

    def wrong(self, quantity: str) -> list[str]:
        """The ways that deviate; NaN deviates."""
        found = self.deviations[quantity].items()
        return [way for way, deviation in found if not deviation <= self.limit(quantity)]

    @property
    def is_reproducible(self) -> bool:
        """Whether two equal runs agree."""
        return all(noise <= self.tolerance for noise in self.noise.values())

    @property
    def proves_it(self) -> bool:
        """Whether nothing deviates and everything was tested."""
        wrong = any(self.wrong(quantity) for quantity in self.deviations)
        return self.is_reproducible and not wrong and not self.untested

    def reasons(self) -> list[str]:
        """What the deviations come from, as far as the ways tell."""
        if not self.is_reproducible:
            return [
                "two equal runs differ: dropout (--attention-dropout 0 --hidden-dropout 0; the "
                "masks depend on the packing), or another source of randomness"
            ]
        found = []
        if any(not d <= self.limit(quantity) for quantity, d in self.from_plan.items()):
            found.append(
                "dummies change it: a term is added, or a mean taken, per micro-batch; divide by "
                "nothing, and weigh terms of your own with microbatch.mean(x)"
            )
        ways = {way for quantity in self.deviations for way in self.wrong(quantity)}
        if ways and not found:
            found.append(
                "it changes with what is packed together: a mean per micro-batch, samples that "
                "see each other (attention, convolutions, states), positions that do not start "
                "anew with each sample, or a loss term that is no sum over tokens (load balancing)"
            )
        return found


def compare(
    ways: Sequence[Variant], found: Mapping[str, Measured], tolerance: float
) -> ModelVerification:
    """Deviations over all ranks; collective.

    Args:
        ways: What was run.
        found: Way → what it gave on this rank.
        tolerance: Largest deviation that counts as equal.
    """
    others = [way.name for way in ways if way.name != ALONE]
    losses = _losses(found)
    alone, plan = found[ALONE].gradients, found[PLAN].gradients
    overall, worst, parameters = {}, {}, []
    for way in others:
        overall[way], of_parameters = _gradient_deviation(found[way].gradients, alone)
        worst[way] = max((d for _, _, d in of_parameters), default=0.0)
        parameters += [(name, rank, way, d) for name, rank, d in of_parameters]
    deviations = {
        LOSS: {way: _relative(losses[way], losses[ALONE]) for way in others},
        GRADIENT: overall,
        WORST: worst,
    }
    noise, dummies = (_from_plan(found[way], plan, losses, way) for way in (AGAIN, DUMMIES))
    values = {LOSS: losses[ALONE], GRADIENT: _norm(alone), WORST: float("nan")}
    metrics = _metrics(found)
    for name, by_way in metrics.items():
        values[name] = by_way[PLAN]
        deviations[name] = {way: _relative(by_way[way], by_way[PLAN]) for way in others}
        noise[name], dummies[name] = deviations[name][AGAIN], deviations[name][DUMMIES]
    parameters.sort(key=lambda p: -p[3])
    most: dict[str, tuple[str, int, str, float]] = {}
    for parameter in parameters:
        most.setdefault(parameter[0], parameter)
    result = ModelVerification(
        values, deviations, noise, dummies, list(most.values())[:MOST_PARAMETERS], tolerance
    )
    unchanged = {way.name for way in ways if not way.changed}
    if PLAN in unchanged:
        result.untested.append("in the plan each sample is alone: raise --max-tokens-per-gpu")
    if OTHER in unchanged:
        result.untested.append("there is no other packing: give the step more, or shorter, samples")
    return result


def _from_plan(
    measured: Measured, plan: Mapping[str, Tensor], losses: Mapping[str, float], way: str
) -> dict[str, float]:
    overall, parameters = _gradient_deviation(measured.gradients, plan)
    worst = max((d for _, _, d in parameters), default=0.0)
    return {LOSS: _relative(losses[way], losses[PLAN]), GRADIENT: overall, WORST: worst}


def _relative(a: float, b: float) -> float:
    if a == b:
        return 0.0
    deviation = abs(a - b) / max(abs(b), 0.01)
    return deviation if np.isfinite(deviation) else float("inf")


def _summed(values: Sequence[float]) -> list[float]:
    """Sums over all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(values, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(total)
    return total.tolist()


def _losses(found: Mapping[str, Measured]) -> dict[str, float]:
    """L by each way: tensor-parallel ranks have the same part."""
    from megatron.core import mpu

    size = mpu.get_tensor_model_parallel_world_size()
    sums = _summed([measured.loss for measured in found.values()])
    return {way: total / size for way, total in zip(found, sums, strict=True)}


def _metrics(found: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    """Name → way → value, as the last rank has them; each sample alone may have none."""
    import torch.distributed as dist

    own = {way: m.metrics for way, m in found.items() if way != ALONE}
    told: list[object] = [own]
    dist.broadcast_object_list(told, src=dist.get_world_size() - 1)
    by_way: dict[str, dict[str, float]] = told[0]  # type: ignore[assignment]
    return {
        name: {way: values.get(name, float("nan")) for way, values in by_way.items()}
        for name in by_way[PLAN]
    }


def _norm(gradients: Mapping[str, Tensor]) -> float:
    return _summed([sum(float(g.double().square().sum()) for g in gradients.values())])[0] ** 0.5


def _gradient_deviation(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> tuple[float, list[tuple[str, int, float]]]:
    """‖difference‖ / ‖reference‖ over all ranks, and (name, rank, deviation) of the worst."""
    import torch.distributed as dist

    squares = {n: float((ours[n] - g).double().square().sum()) for n, g in theirs.items()}
    own = {n: float(g.double().square().sum()) for n, g in theirs.items()}
    numbers = {n: g.numel() for n, g in theirs.items()}
    difference, scale, count = _summed(
        [sum(squares.values()), sum(own.values()), float(sum(numbers.values()))]
    )
    typical = scale / count if count else 0.0
    rank = dist.get_rank()
    local = [
        (n, rank, _ratio(s, max(own[n], SMALLEST_SHARE**2 * typical * numbers[n])))
        for n, s in squares.items()
    ]
    local.sort(key=lambda p: -p[2])
    parts: list[list[tuple[str, int, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, local[:MOST_PARAMETERS])
    return _ratio(difference, scale), sorted(sum(parts, []), key=lambda p: -p[2])


def _ratio(difference: float, scale: float) -> float:
    """Root of the quotient of two sums of squares; infinite where there is no number."""
    if difference == 0:
        return 0.0
    value = (difference / scale) ** 0.5 if scale > 0 else float("inf")
    return value if np.isfinite(value) else float("inf")


def as_table(result: ModelVerification) -> str:
    """Deviations by quantity and way, the parameters that differ most, the verdict and reasons."""
    ways = list(result.deviations[LOSS])
    width = max(map(len, result.deviations)) + 2
    lines = [f"\ndeviation from {ALONE!r} (of a metric, from {PLAN!r}); = is at most the tolerance"]
    lines.append(" " * width + "  ".join(["     value", *ways, "two equal runs"]))
    for quantity, by_way in result.deviations.items():
        wrong = result.wrong(quantity)
        entries = [
            (f"{d:.1e}" if way in wrong else "=").rjust(len(way)) for way, d in by_way.items()
        ]
        value = result.values[quantity]
        shown = f"{value:10.3g}" if np.isfinite(value) else " " * 10
        entries.append(f"{result.noise[quantity]:.1e}".rjust(14))
        lines.append(quantity.ljust(width) + "  ".join([shown, *entries]))
    lines.append("parameters that differ most:")
    for name, rank, way, deviation in result.parameters:
        lines.append(f"  {deviation:.1e}  {name} (rank {rank}, {way})")
    wrong_ones = [quantity for quantity in result.deviations if result.wrong(quantity)]
    largest = max(d for by_way in result.deviations.values() for d in by_way.values())
    if wrong_ones or not result.is_reproducible:
        named = ", ".join(wrong_ones) or "two equal runs"
        lines.append(f"{styled('NOT invariant', 'bold red')}: {named}")
        lines += [f"  {reason}" for reason in result.reasons()]
    else:
        word = styled("invariant", "green") if result.proves_it else "invariant as far as tested"
        lines.append(f"{word}: nothing deviates by more than {largest:.1e}")
    lines += [f"{styled('NOT tested', 'bold red')}: {why}" for why in result.untested]
    return "\n".join(lines)

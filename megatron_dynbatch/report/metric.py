"""Metrics that know how they add up: over micro-batches, over ranks, over rollouts.

A metric travels as the few numbers that determine it (its parts), never as a finished value, so
the order and the grouping in which parts meet cannot change it. Division happens once, at the end:

    kind    parts                       meet by               value
    mean    Σ w·x, Σ w (or B)           +                     first / second
    sum     Σ x                         +                     itself
    count   n                           +                     itself
    min     least x                     min                   itself
    max     largest x                   max                   itself
    std     n, mean, Σ (x − mean)²      Chan et al. (1979)    √(third / first), population

A mean or std of nothing, and the least or largest of nothing, is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["mean", "sum", "count", "min", "max", "std"]
Number = float | int | Tensor

SUMMED = ("mean", "sum", "count")
NUM_PARTS: dict[str, int] = {"mean": 2, "sum": 1, "count": 1, "min": 1, "max": 1, "std": 3}


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric's parts, from one micro-batch, one rank or one batch of rollouts.

    Attributes:
        kind: How parts meet and what the value is.
        parts: As many numbers as the kind has; 0-d tensors stay on their device.

    Raises:
        ValueError: Unknown kind or another number of parts.
    """

    kind: Kind
    parts: tuple[Number, ...]

    def __post_init__(self) -> None:
        if self.kind not in NUM_PARTS:
            raise ValueError(f"a metric's kind is one of {', '.join(NUM_PARTS)}, got {self.kind!r}")
        if len(self.parts) != NUM_PARTS[self.kind]:
            raise ValueError(
                f"a metric of kind {self.kind} has {NUM_PARTS[self.kind]} parts, got "
                f"{len(self.parts)}"
            )

    @classmethod
    def mean(cls, numerator: Number, denominator: Number) -> Metric:
        """Σ w·x beside what it is finally divided by."""
        return cls("mean", (numerator, denominator))

    @classmethod
    def mean_of(cls, values: Iterable[float]) -> Metric:
        """Plain mean of these values."""
        listed = list(values)
        return cls("mean", (float(sum(listed)), float(len(listed))))

    @classmethod
    def total(cls, value: Number) -> Metric:
        """A sum."""
        return cls("sum", (value,))

    @classmethod
    def count(cls, number: Number) -> Metric:
        """A number of things."""
        return cls("count", (number,))

    @classmethod
    def least(cls, x: Tensor, mask: Tensor) -> Metric:
        """Smallest x where the mask is not 0."""
        return cls("min", (_extreme(x, mask, torch.inf).amin(),))

    @classmethod
    def largest(cls, x: Tensor, mask: Tensor) -> Metric:
        """Largest x where the mask is not 0."""
        return cls("max", (_extreme(x, mask, -torch.inf).amax(),))

    @classmethod
    def std_of(cls, values: Iterable[float]) -> Metric:
        """Population standard deviation of these values."""
        listed = [float(x) for x in values]
        mean = sum(listed) / len(listed) if listed else 0.0
        return cls("std", (float(len(listed)), mean, sum((x - mean) ** 2 for x in listed)))

    def value(self) -> float:
        """The finished number."""
        return finished(self.kind, [float(part) for part in self.parts])


def finished(kind: str, parts: Sequence[float]) -> float:
    """What the parts of all contributions together amount to."""
    if kind == "mean":
        return parts[0] / parts[1] if parts[1] else math.nan
    if kind == "std":
        return math.sqrt(parts[2] / parts[0]) if parts[0] else math.nan
    if kind in ("min", "max") and math.isinf(parts[0]):
        nothing = math.inf if kind == "min" else -math.inf
        return math.nan if parts[0] == nothing else parts[0]
    return parts[0]


def _extreme(x: Tensor, mask: Tensor, nothing: float) -> Tensor:
    kept = torch.where(mask.reshape(-1) != 0, x.detach().reshape(-1).double(), nothing)
    return torch.nn.functional.pad(kept, (0, 1), value=nothing)  # of no tokens: nothing


def meet(kind: str, parts: Tensor) -> Tensor:
    """Parts of several contributions together: float64 [n, parts of the kind] → [parts].

    The order of the rows is that in which the ranks are numbered, so every rank gets the same
    number to the last bit.
    """
    if kind == "min":
        return parts.amin(0)
    if kind == "max":
        return parts.amax(0)
    if kind in SUMMED:
        return parts.sum(0)
    count, mean, deviations = parts.unbind(1)
    total = count.sum()
    centre = (count * mean).sum() / total.clamp(min=1.0)
    spread = deviations.sum() + (count * (mean - centre).square()).sum()
    return torch.stack([total, centre, spread])


def merge(contributions: Sequence[Mapping[str, Metric]], what: str) -> dict[str, Metric]:
    """The metrics of several micro-batches (or batches) together.

    Args:
        contributions: Name → metric, the same names and kinds in each.
        what: What a contribution is called in an error, "micro-batch" for example.

    Raises:
        ValueError: A name that one contribution lacks, or another kind, naming both.
    """
    if not contributions:
        return {}
    kinds = [{name: m.kind for name, m in one.items()} for one in contributions]
    check_agreement(kinds, what)
    rows = _rows([[p for name in kinds[0] for p in one[name].parts] for one in contributions])
    sums = rows.sum(0).unbind()  # what most kinds need, in one operation
    merged, start = {}, 0
    for name, kind in kinds[0].items():
        stop = start + NUM_PARTS[kind]
        met = sums[start:stop]
        if kind not in SUMMED:
            met = meet(kind, rows[:, start:stop]).unbind()
        merged[name] = Metric(contributions[0][name].kind, met)
        start = stop
    return merged


def _rows(parts: Sequence[Sequence[Number]]) -> Tensor:
    """float64 [n, parts] of n contributions, with few operations, where the tensors among them are.

    A GPU is not made to wait.
    """
    flat = [part for row in parts for part in row]
    if all(not isinstance(part, Tensor) or part.is_cpu for part in flat):
        on_cpu = [part.item() if isinstance(part, Tensor) else float(part) for part in flat]
        return torch.tensor(on_cpu, dtype=torch.float64).view(len(parts), -1)
    places = [i for i, part in enumerate(flat) if isinstance(part, Tensor)]
    numbers = torch.tensor(
        [0.0 if isinstance(part, Tensor) else float(part) for part in flat], dtype=torch.float64
    )
    if places:
        tensors = [part.detach().reshape(()) for part in flat if isinstance(part, Tensor)]
        device = next((t.device for t in tensors if t.device.type != "cpu"), tensors[0].device)
        if any(t.dtype != tensors[0].dtype or t.device != device for t in tensors):
            tensors = [t.to(device, torch.float64, non_blocking=True) for t in tensors]
        stacked = torch.stack(tensors).double()
        if len(places) == len(flat):
            return stacked.view(len(parts), -1)
        index = torch.tensor(places).to(device, non_blocking=True)
        numbers = numbers.to(device, non_blocking=True).index_copy_(0, index, stacked)
    return numbers.view(len(parts), -1)


def on_host(numbers: Sequence[Tensor]) -> list[float]:
    """Values of tensors with one element each; a GPU is waited for once."""
    if all(number.is_cpu for number in numbers):
        return [number.item() for number in numbers]
    return torch.stack([number.detach().reshape(()).double() for number in numbers]).tolist()


def check_agreement(kinds: Sequence[Mapping[str, str]], what: str) -> None:
    """Raises ValueError unless all contributions have the same names and kinds."""
    if all(one == kinds[0] for one in kinds):
        return
    everywhere = dict.fromkeys(name for one in kinds for name in one)
    for name in everywhere:
        have = [i for i, one in enumerate(kinds) if name in one]
        lack = [i for i, one in enumerate(kinds) if name not in one]
        if lack:
            raise ValueError(
                f"metric {name!r} is reported by {what} {_listed(have)} but not by {what} "
                f"{_listed(lack)}; which metrics there are must depend on options, never on data"
            )
        found = {one[name] for one in kinds}
        if len(found) > 1:
            by = ", ".join(f"{one[name]} by {what} {i}" for i, one in enumerate(kinds))
            raise ValueError(f"metric {name!r} is reported as {by}; give it one kind")


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def parts_of(metric: Metric) -> Tensor:
    """The parts as one float64 tensor, on the device of those that are tensors."""
    parts = [torch.as_tensor(part, dtype=torch.float64).reshape(()) for part in metric.parts]
    device = next((p.device for p in parts if p.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([part.to(device, non_blocking=True) for part in parts]).detach()

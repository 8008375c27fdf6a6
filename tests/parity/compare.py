"""Compare what Megatron did with the reference, quantity by quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tests.parity.job import Observed, assemble
from tests.parity.reference import ReferenceStep

_NOT_METRICS = {"iteration", "learning_rate", "grad_norm", "consumed"}


def deviations(
    observed: Sequence[Observed], reference: Sequence[ReferenceStep], *, tensors: bool = True
) -> dict[str, float]:
    """Largest relative deviation of each quantity over all steps.

    Args:
        observed: What each rank saw.
        reference: The reference's steps.
        tensors: Whether gradients (where ranks have whole ones) and parameters are compared too.

    Returns:
        Quantity → deviation. Metrics (the loss is one), norms and rates relative to the
        reference's value, tensors by their largest entry's difference relative to the largest
        entry of that step's tensors of that name. ``consumed`` is an absolute difference.

    Raises:
        AssertionError: Numbers of steps differ, or ranks disagree about what they share.
    """
    last = observed[-1].rows
    assert len(last) == len(reference), f"{len(last)} steps were trained, not {len(reference)}"
    for rank, one in enumerate(observed):
        shared = [{k: row[k] for k in ("iteration", "consumed")} for row in one.rows]
        expected = [{k: row[k] for k in ("iteration", "consumed")} for row in last]
        assert shared == expected, f"rank {rank} counts {shared}, the last rank {expected}"
    found = dict.fromkeys(
        ("metrics", "grad norm", "learning rate", "weight decay", "consumed"), 0.0
    )
    rates, decays = observed[-1].learning_rates, observed[-1].weight_decays
    for before, step in enumerate(reference[:-1]):
        _raise_to(found, "learning rate", _relative(rates[before + 1], step.learning_rate))
        _raise_to(found, "weight decay", _relative(decays[before + 1], step.weight_decay))
    for row, step in zip(last, reference, strict=True):
        assert row.keys() - _NOT_METRICS == step.metrics.keys(), f"metrics reported: {row}"
        for name, mean in step.metrics.items():
            _raise_to(found, "metrics", _relative(row[name], mean))
        _raise_to(found, "grad norm", _relative(row["grad_norm"], step.grad_norm))
        _raise_to(found, "learning rate", _relative(row["learning_rate"], step.learning_rate))
        _raise_to(found, "consumed", abs(row["consumed"] - step.consumed))
    for quantity in ("gradients", "parameters") if tensors else ():
        found |= _tensor_deviations(quantity, observed, reference)
    return found


def _tensor_deviations(
    quantity: str, observed: Sequence[Observed], reference: Sequence[ReferenceStep]
) -> dict[str, float]:
    """The largest deviation of gradients or parameters; nothing where no rank has whole ones."""
    if not getattr(observed[0], quantity):
        return {}
    whole = [
        assemble([getattr(one, quantity)[number] for one in observed])
        for number in range(len(reference))
    ]
    return {
        quantity: max(
            tensor_deviation(ours, getattr(step, quantity))
            for ours, step in zip(whole, reference, strict=True)
        )
    }


def tensor_deviation(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest |ours − theirs| over all names, relative to the largest |theirs| of that name."""
    assert ours.keys() == theirs.keys(), f"names differ: {sorted(ours.keys() ^ theirs.keys())}"
    worst = 0.0
    for name, value in theirs.items():
        scale = value.abs().max().item() or 1.0
        worst = max(worst, (ours[name].double() - value.double()).abs().max().item() / scale)
    return worst


def _raise_to(found: dict[str, float], name: str, value: float) -> None:
    found[name] = max(found.get(name, 0.0), value)


def _relative(ours: float, theirs: float) -> float:
    return abs(ours - theirs) / abs(theirs) if theirs else abs(ours)

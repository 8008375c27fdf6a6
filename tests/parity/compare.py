"""Compare what Megatron did with the reference, quantity by quantity."""

from __future__ import annotations

from collections.abc import Sequence

from tests.deviation import between_named, largest, relative
from tests.parity.job import Observed, assemble
from tests.parity.reference import ReferenceStep

tensor_deviation = between_named
_NOT_METRICS = {"iteration", "learning_rate", "grad_norm", "consumed"}


def deviations(
    observed: Sequence[Observed], reference: Sequence[ReferenceStep], *, tensors: bool = True
) -> dict[str, float]:
    """Largest relative deviation of each quantity over all steps.

    Args:
        observed: What each rank saw.
        reference: The reference's steps.
        tensors: Whether gradients and parameters are compared too.

    Returns:
        Quantity → deviation. Metrics (the loss is one), norms and rates relative to the
        reference's value, tensors by their largest entry's difference relative to the largest
        entry of that step's tensors of that name. ``consumed`` is an absolute difference. What is
        not finite deviates infinitely.

    Raises:
        AssertionError: Numbers of steps differ, ranks disagree about what they share, or a metric,
            a rate or a tensor is missing on one side.
    """
    last = observed[-1].rows
    assert len(last) == len(reference), f"{len(last)} steps were trained, not {len(reference)}"
    for rank, one in enumerate(observed):
        shared = [{k: row[k] for k in ("iteration", "consumed")} for row in one.rows]
        expected = [{k: row[k] for k in ("iteration", "consumed")} for row in last]
        assert shared == expected, f"rank {rank} counts {shared}, the last rank {expected}"
        names = [row.keys() - _NOT_METRICS for row in one.rows]
        wanted = [set(step.metrics) for step in reference]
        # Ranks before the last pipeline stage have no metrics at all.
        has_metrics = one is observed[-1] or any(names)
        assert names == wanted or not has_metrics, f"rank {rank} reports {names}, not {wanted}"
    pairs = list(zip(last, reference, strict=True))
    found = {
        "metrics": largest(
            relative(row[name], mean)
            for one in observed
            for row, step in zip(one.rows, reference, strict=True)
            for name, mean in step.metrics.items()
            if name in row
        ),
        "grad norm": largest(relative(row["grad_norm"], step.grad_norm) for row, step in pairs),
        "learning rate": largest(
            relative(row["learning_rate"], step.learning_rate) for row, step in pairs
        ),
        "weight decay": 0.0,
        "consumed": largest(abs(row["consumed"] - step.consumed) for row, step in pairs),
    }
    for quantity in ("learning rate", "weight decay"):
        attribute = quantity.replace(" ", "_")
        used = getattr(observed[-1], f"{attribute}s")
        # A step's rate is that for the next one; a skipped step has none.
        ahead = [getattr(step, attribute) for step in reference[:-1]]
        assert len(used) == len(reference), f"{len(used)} optimizer steps, not {len(reference)}"
        off = largest(map(relative, used[1:], ahead))
        found[quantity] = max(found[quantity], off)
    for quantity in ("gradients", "parameters") if tensors else ():
        found |= _tensor_deviations(quantity, observed, reference)
    return found


def _tensor_deviations(
    quantity: str, observed: Sequence[Observed], reference: Sequence[ReferenceStep]
) -> dict[str, float]:
    """The largest deviation of gradients or parameters."""
    counts = {len(getattr(one, quantity)) for one in observed}
    assert counts == {len(reference)}, f"ranks have {quantity} of {counts} steps"
    whole = [
        assemble([getattr(one, quantity)[number] for one in observed])
        for number in range(len(reference))
    ]
    return {
        quantity: largest(
            tensor_deviation(ours, getattr(step, quantity))
            for ours, step in zip(whole, reference, strict=True)
        )
    }

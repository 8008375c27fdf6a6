"""How far two results are apart. What is not finite is infinitely far, and so is what is missing.

`max(found, nan)` is `found`, and `nan == nan` passes for some comparisons: every largest deviation
in tests and benchmarks is therefore taken here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor


def relative(ours: float, theirs: float, *, least: float = 0.0) -> float:
    """|ours − theirs| relative to |theirs|, or absolute where that is 0; infinite unless finite.

    Args:
        ours: What was found.
        theirs: What it is compared with.
        least: Smallest scale; smaller values of `theirs` are compared relative to it.
    """
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return math.inf
    return abs(ours - theirs) / (max(abs(theirs), least) or 1.0)


def largest(deviations: Iterable[float]) -> float:
    """The largest of them, 0 of none; infinite if one is not a finite number."""
    worst = 0.0
    for one in deviations:
        worst = max(worst, one) if math.isfinite(one) else math.inf
    return worst


def between_tensors(ours: Tensor, theirs: Tensor) -> float:
    """Largest |ours − theirs| relative to the largest |theirs|; infinite for another shape."""
    if ours.shape != theirs.shape:
        return math.inf
    if not theirs.numel():
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    # torch's max is NaN if one entry is.
    scale = theirs.abs().max().item() or 1.0
    return largest([(ours - theirs).abs().max().item() / scale])


def between_named(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest deviation over all names.

    Raises:
        AssertionError: A name is missing on one side.
    """
    assert ours.keys() == theirs.keys(), f"names differ: {sorted(ours.keys() ^ theirs.keys())}"
    return largest(between_tensors(ours[name], value) for name, value in theirs.items())

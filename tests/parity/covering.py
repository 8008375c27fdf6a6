"""A small set of cells in which every two values of any two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Choice = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Choice], bool] = lambda choice: True
) -> list[Choice]:
    """Greedy covering array of strength two.

    Args:
        factors: Name → values.
        allowed: Tells whether a (partial) choice may occur.

    Returns:
        Choices, one value for each factor, that contain every allowed pair of values.
    """
    everything = [
        choice
        for values in itertools.product(*factors.values())
        if allowed(choice := dict(zip(factors, values, strict=True)))
    ]
    missing = set().union(*(_pairs(choice) for choice in everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda choice: len(_pairs(choice) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(choice: Choice) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(choice.items()), 2))

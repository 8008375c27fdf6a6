"""A small set of cells in which every two values of any two factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
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


def sampled(
    names: Collection[str],
    draw: Callable[[frozenset[str]], frozenset[str]],
    met: Callable[[frozenset[str]], Collection[frozenset[str]]],
    tries: int = 200,
) -> list[frozenset[str]]:
    """The same for factors too many to enumerate: the best of random sets, again and again.

    Args:
        names: What must meet in pairs.
        draw: A random set of names with all of the given ones in it, where that can be.
        met: The pairs that meet in a set; none if it may not occur.
        tries: Random sets for one choice.

    Returns:
        Sets in which every two names meet that met in any set that was drawn.
    """
    missing = {frozenset(pair) for pair in itertools.combinations(sorted(names), 2)}
    chosen = []
    while missing:
        wanted = min(missing, key=sorted)
        drawn = [(one, set(met(one))) for one in (draw(wanted) for _ in range(tries))]
        fitting = [(one, pairs) for one, pairs in drawn if wanted in pairs]
        if not fitting:
            missing.remove(wanted)  # never together
            continue
        best, pairs = max(fitting, key=lambda found: len(found[1] & missing))
        chosen.append(best)
        missing -= pairs
    return chosen

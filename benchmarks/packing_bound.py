"""A stronger lower bound on the number of micro-batches, for steps that are packed to the brim.

The linear relaxation over all ways of filling one micro-batch (Gilmore and Gomory, 1961), solved by
column generation. Lengths and cap are rounded down to multiples of a unit first, which can only
lower the bound. Takes seconds to minutes, so planning itself does without it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

TOLERANCE = 1e-6


def fractional_bound(lengths: NDArray[np.int64], capacity: int, unit: int) -> int:
    """No packing needs fewer micro-batches.

    Args:
        lengths: Laid-out tokens of each sample [S], none longer than `capacity`.
        capacity: Tokens that a micro-batch holds.
        unit: Tokens per unit of length; smaller ones give a higher bound, and take longer.
    """
    room = capacity // unit
    units = lengths // unit
    sizes, demand = np.unique(units[units > 0], return_counts=True)
    if not sizes.size:
        return int(lengths.size > 0)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    rows = [solver.Constraint(float(count), solver.infinity()) for count in demand]
    goal = solver.Objective()
    goal.SetMinimization()

    def add(filling: dict[int, int]) -> None:
        variable = solver.NumVar(0.0, solver.infinity(), "")
        goal.SetCoefficient(variable, 1.0)
        for place, count in filling.items():
            rows[place].SetCoefficient(variable, float(count))

    for place, size in enumerate(sizes.tolist()):
        add({place: room // size})
    while True:
        assert solver.Solve() == pywraplp.Solver.OPTIMAL
        prices = np.array([row.dual_value() for row in rows])
        values, last = _best_fillings(sizes, prices, room)
        # Prices divided by the dearest filling are feasible: their worth is a bound.
        if values[room] <= 1 + TOLERANCE:
            worth = float(prices @ demand) / max(1.0, float(values[room]))
            return math.ceil(worth - TOLERANCE * len(lengths))
        for place, size in enumerate(sizes.tolist()):
            if prices[place] + values[room - size] > 1 + TOLERANCE:
                filling = _filling(sizes, last, room - size)
                filling[place] = filling.get(place, 0) + 1
                add(filling)


def _best_fillings(
    sizes: NDArray[np.int64], prices: NDArray[np.float64], room: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Highest price of what fits into each room, and the size put in last (−1: none)."""
    values = np.zeros(room + 1)
    last = np.full(room + 1, -1)
    for space in range(int(sizes[0]), room + 1):
        count = int(np.searchsorted(sizes, space, side="right"))
        worth = prices[:count] + values[space - sizes[:count]]
        place = int(worth.argmax())
        if worth[place] > values[space - 1]:
            values[space], last[space] = worth[place], place
        else:
            values[space] = values[space - 1]
    return values, last


def _filling(sizes: NDArray[np.int64], last: NDArray[np.int64], room: int) -> dict[int, int]:
    """Place of size → how often, in the best filling of a room."""
    filling: dict[int, int] = {}
    while room > 0:
        place = int(last[room])
        if place < 0:
            room -= 1
            continue
        filling[place] = filling.get(place, 0) + 1
        room -= int(sizes[place])
    return filling

"""Named length distributions of training batches, for benchmarks and for trying a layout out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.errors import PlanError

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


@dataclass(frozen=True)
class Distribution:
    """Lengths of samples, in tokens.

    Attributes:
        summary: What it stands for, in one line.
        capacity: Tokens that a micro-batch may hold; over cp GPUs each takes capacity / cp.
        shortest: Draws are clipped from below to this.
        longest: Draws are clipped from above to this.
        draw: Unclipped draws.
    """

    summary: str
    capacity: int
    shortest: int
    longest: int
    draw: Draw


def _lognormal(median: float, sigma: float) -> Draw:
    return lambda rng, size: rng.lognormal(math.log(median), sigma, size)


def _mixture(share: float, first: Draw, second: Draw) -> Draw:
    def draw(rng: np.random.Generator, size: int) -> NDArray[np.float64]:
        is_first = rng.random(size) < share
        return np.where(is_first, first(rng, size), second(rng, size))

    return draw


def _uniform(low: int, high: int) -> Draw:
    return lambda rng, size: rng.uniform(low, high, size)


DISTRIBUTIONS: dict[str, Distribution] = {
    "A": Distribution(
        "short answers, heavy tail", 8192, 128, 8192, _lognormal(1024 / math.exp(1.125), 1.5)
    ),
    "B": Distribution("reasoning, moderate tail", 32768, 16, 32768, _lognormal(4300, 0.68)),
    "C": Distribution(
        "agentic mix of long and short",
        65536,
        64,
        65536,
        _mixture(0.8, _lognormal(12000, 0.9), _lognormal(800, 0.7)),
    ),
    "D": Distribution("large pieces that pack badly", 9216, 2000, 6000, _uniform(2000, 6000)),
    "E": Distribution(
        "supervised, rare long documents",
        65536,
        1,
        65536,
        _mixture(0.9989, _uniform(900, 1100), _uniform(36000, 38000)),
    ),
    "F": Distribution("short chat", 8192, 16, 8192, _lognormal(500, 0.99)),
    "G": Distribution("long chains of thought", 32768, 256, 32768, _lognormal(8000, 1.0)),
}


def draw_lengths(name: str, num_samples: int, seed: int) -> NDArray[np.int64]:
    """Lengths [num_samples] of a named distribution.

    Raises:
        PlanError: There is no such distribution.
    """
    if name not in DISTRIBUTIONS:
        raise PlanError(f"no distribution {name!r}: use one of {', '.join(DISTRIBUTIONS)}")
    distribution = DISTRIBUTIONS[name]
    draws = distribution.draw(np.random.default_rng([seed, ord(name)]), num_samples)
    clipped = np.clip(draws, distribution.shortest, distribution.longest)
    return np.rint(clipped).astype(np.int64)


def draw_rollout_ids(num_samples: int, seed: int) -> NDArray[np.int64]:
    """Rollout of each sample [num_samples], agentic: 1 + NegBin(mean 1.41, r 1.7) samples each."""
    mean, r = 1.41, 1.7
    rng = np.random.default_rng([seed, num_samples])
    sizes = 1 + rng.negative_binomial(r, r / (r + mean), num_samples)
    return np.repeat(np.arange(num_samples), sizes)[:num_samples]

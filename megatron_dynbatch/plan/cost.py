"""What a sample costs to train on: α·s + β·s², and γ per micro-batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.errors import PlanError

# Sums of a million integer costs stay far below 2**63 with a largest cost of 2**40.
LARGEST_INTEGER_COST = 1 << 40


@dataclass(frozen=True)
class CostModel:
    """Cost of a micro-batch: Σ over its samples of (alpha·s + beta·s²), plus gamma.

    Only ratios matter to packing. The default is a dense model of about 7B parameters
    (hidden size 4096: 6·4096 = 24576 linear FLOPs per causal-attention FLOP and token).

    Attributes:
        alpha: Cost per token.
        beta: Cost per token pair.
        gamma: Fixed cost of a micro-batch (launches, communication latency).
    """

    alpha: float = 24576.0
    beta: float = 1.0
    gamma: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise PlanError(f"cost model: {name} must be finite and >= 0, got {value!r}")
        if self.alpha == 0 and self.beta == 0:
            raise PlanError("cost model: alpha and beta are both 0, every sample would be free")

    def sample_costs(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of each sample [S], in the model's own unit, without gamma."""
        tokens = lengths.astype(np.float64)
        return self.alpha * tokens + self.beta * tokens * tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `CostModel(**d)` is the way back."""
        return dict(self.__dict__)


def integer_costs(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Costs [S] as integers: exact sums, hence the same plan on every platform.

    Integral costs that are small enough stay as they are; others are scaled by a power of two.
    """
    largest = float(costs.max()) if costs.size else 0.0
    exponent = math.frexp(largest)[1] if largest > 0 else 0
    limit = LARGEST_INTEGER_COST.bit_length() - 1
    if exponent <= limit and bool((costs == np.rint(costs)).all()):
        return costs.astype(np.int64)
    return np.maximum(1, np.rint(np.ldexp(costs, limit - exponent))).astype(np.int64)

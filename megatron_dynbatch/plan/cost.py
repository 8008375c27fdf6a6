"""What a sample costs to train on."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.wording import short

# Sums of a million integer costs stay far below 2**63 with a largest cost of 2**40.
LARGEST_INTEGER_COST = 1 << 40
# Costs stay finite in float64 with lengths of any sample squared.
LARGEST_COEFFICIENT = 1e200


@dataclass(frozen=True)
class CostModel:
    """Cost of a micro-batch: the sum of its samples' costs, plus gamma.

    A sample of s tokens costs alpha·s + beta·s² + window_beta·(m² + 2·window·(s − m)) with
    m = min(s, window): the last term is what causal attention in a sliding window costs, in the
    unit in which full causal attention costs s².

    Only ratios matter to packing. The default is the usual stand-in, a dense model of hidden
    size 4096 (about 7B parameters) with 6·4096 = 24576 linear FLOPs per token and attention
    counted over the whole square. `model_cost.cost_from_megatron` counts a Megatron config,
    causal masks included; `model_cost.fit_cost` fits a model to measured times.

    Attributes:
        alpha: Cost per token.
        beta: Cost per token pair under full causal attention.
        gamma: Fixed cost of a micro-batch (launches, communication latency).
        window_beta: Cost per token pair under sliding-window attention.
        window: Tokens that a position attends to, itself included.
        function: Instead of all of these but gamma, the import path `package.module:function`
            of a function from lengths int64 [S] to costs float64 [S].
    """

    alpha: float = 24576.0
    beta: float = 1.0
    gamma: float = 0.0
    window_beta: float = 0.0
    window: int = 0
    function: str | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "window_beta", "window"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= LARGEST_COEFFICIENT:
                raise PlanError(
                    f"cost model: {name} must be finite and >= 0, got {short(value)}; at most "
                    f"{LARGEST_COEFFICIENT:g}"
                )
        if not isinstance(self.function, str | None):
            raise PlanError(f"cost model: function {short(self.function)} is no import path")
        if self.window_beta and not self.window:
            raise PlanError("cost model: window_beta needs a window")
        if not (self.alpha or self.beta or self.window_beta or self.function):
            raise PlanError("cost model: every coefficient is 0, every sample would be free")

    def sample_costs(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Cost of each sample [S], in the model's own unit, without gamma.

        Raises:
            PlanError: A custom function answers something else than S finite costs > 0.
        """
        if self.function is not None:
            return _call_function(self.function, lengths)
        tokens = lengths.astype(np.float64)
        costs = self.alpha * tokens + self.beta * tokens * tokens
        if self.window_beta:
            inside = np.minimum(tokens, self.window)
            pairs = inside * inside + 2.0 * self.window * (tokens - inside)
            costs = costs + self.window_beta * pairs
        return costs

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `CostModel(**d)` is the way back."""
        return dict(self.__dict__)


TOKENS = CostModel(alpha=1.0, beta=0.0)


def _call_function(path: str, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    module_name, _, attribute = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"cost function {path!r} cannot be imported: {error}") from error
    costs = np.asarray(function(lengths), dtype=np.float64)
    if costs.shape != lengths.shape:
        raise PlanError(
            f"cost function {path!r} answers shape {costs.shape} for {lengths.size} lengths"
        )
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs > 0)))
    if bad.size:
        place = int(bad[0])
        raise PlanError(
            f"cost function {path!r} answers {costs[place]} for sample {place} of "
            f"{int(lengths[place])} tokens as laid out; costs must be finite and > 0"
        )
    return costs


def integer_costs(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Costs [S] as integers: exact sums, hence the same plan on every platform.

    Integral costs that are small enough stay as they are; others are scaled by a power of two.
    """
    exponent = _exponent(costs)
    if exponent == 0:
        return costs.astype(np.int64)
    return np.maximum(1, np.rint(np.ldexp(costs, exponent))).astype(np.int64)


def integer_gamma(costs: NDArray[np.float64], gamma: float) -> int:
    """The fixed cost of a micro-batch, scaled as `integer_costs` scales the costs [S]."""
    return round(math.ldexp(gamma, _exponent(costs)))


def _exponent(costs: NDArray[np.float64]) -> int:
    """Power of two by which costs are scaled."""
    largest = float(costs.max()) if costs.size else 0.0
    exponent = math.frexp(largest)[1] if largest > 0 else 0
    limit = LARGEST_INTEGER_COST.bit_length() - 1
    if exponent <= limit and bool((costs == np.rint(costs)).all()):
        return 0
    return limit - exponent

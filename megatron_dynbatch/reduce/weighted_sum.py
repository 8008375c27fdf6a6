"""Σ w·x over the tokens of this rank: the one reduction under every loss and mean metric.

Invariants (asserted by the tests): accumulation is in float64 whatever the dtype of x; a position
whose weight is 0 is selected away, so NaN or Inf there changes neither the sum nor the gradient.
"""

from torch import Tensor

from megatron_dynbatch.reduce.checks import Accumulate, check_accumulate, check_values
from megatron_dynbatch.reduce.ops import OPS, WeightedSums, eager_on_host


def weighted_sums(x: Tensor, w: Tensor, *, accumulate: Accumulate = "float64") -> Tensor:
    """Sums K values at once: out[k] = Σ_t w[t]·x[k, t].

    Args:
        x: contiguous [K, T] per-token values, float32, bfloat16, float16 or float64.
        w: [T] float64 token weights; 0 where the token does not count.
        accumulate: "float64", or "exact": limbs whose sum over tokens, micro-batches and ranks is
            bitwise the same in every order (see `exact.py`), without gradient.

    Returns:
        float64 [K], differentiable in x; int64 limbs [K, 3] with "exact".

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit, naming them.
    """
    check_values(x, w)
    check_accumulate(accumulate)
    if accumulate == "exact":
        return OPS.exact_sums.default(x.detach(), w)
    if eager_on_host(x):
        return WeightedSums.apply(x, w, True)
    return OPS.weighted_sums.default(x, w)


def weighted_sum(x: Tensor, w: Tensor) -> Tensor:
    """Sums one value: Σ_t w[t]·x[t], as `weighted_sums`, for x and w of shape [T].

    Returns:
        0-d float64, differentiable in x.
    """
    if x.dim() != 1:
        raise ValueError(f"values must be [T], got {list(x.shape)}")
    return weighted_sums(x[None], w)[0]

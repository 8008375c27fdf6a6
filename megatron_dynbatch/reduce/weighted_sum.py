"""Σ w·x over the tokens of this rank: the one reduction under every loss and mean metric.

Invariants (asserted by the tests): accumulation is in float64 whatever the dtype of x; a position
whose weight is 0 is selected away, so NaN or Inf there changes neither the sum nor the gradient.
"""

from typing import Any

import torch
from torch import Tensor


class _WeightedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        ctx.dtype = x.dtype
        return torch.where(w != 0, x, 0.0).to(torch.float64) @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (w,) = ctx.saved_tensors
        return torch.outer(grads[0], w).to(ctx.dtype), None


def check_weights(x: Tensor, w: Tensor) -> None:
    """Raises ValueError unless w is [T] float64, a constant, on x's device, and x is [K, T]."""
    if w.dim() != 1 or w.dtype != torch.float64:
        raise ValueError(f"token weights must be float64 [T], got {w.dtype} {list(w.shape)}")
    if w.requires_grad:
        raise ValueError("token weights are constants of the step; detach them")
    if x.dim() != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"values of shape {list(x.shape)} do not match token weights of shape {list(w.shape)}:"
            " expected [K, T] and [T]"
        )
    if not x.dtype.is_floating_point:
        raise ValueError(f"values must be floating point, got {x.dtype}")
    if x.device != w.device:
        raise ValueError(f"values are on {x.device}, token weights on {w.device}")


def weighted_sums(x: Tensor, w: Tensor) -> Tensor:
    """Sums K values at once: out[k] = Σ_t w[t]·x[k, t].

    Args:
        x: [K, T] per-token values, float32, bfloat16, float16 or float64.
        w: [T] float64 token weights; 0 where the token does not count.

    Returns:
        float64 [K], differentiable in x.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit, naming them.
    """
    check_weights(x, w)
    return _WeightedSums.apply(x, w)


def weighted_sum(x: Tensor, w: Tensor) -> Tensor:
    """Sums one value: Σ_t w[t]·x[t], as `weighted_sums`, for x and w of shape [T].

    Returns:
        0-d float64, differentiable in x.
    """
    if x.dim() != 1:
        raise ValueError(f"values must be [T], got {list(x.shape)}")
    return weighted_sums(x[None], w)[0]

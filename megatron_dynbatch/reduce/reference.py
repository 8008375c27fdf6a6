"""The definition of every reduction in torch: the CPU path, and what kernels are tested against.

Plain functions on tensors, without autograd and without checks; `ops.py` registers them, the
public functions check their arguments. Each is a fixed, small number of torch calls whatever the
number of samples and values. Accumulation is in float64; positions of weight 0 are selected away.
"""

import math

import torch
from torch import Tensor


def selected(x: Tensor, w: Tensor) -> Tensor:
    """x [K, T] with 0 wherever w [T] is 0, in x's dtype."""
    return torch.where(w != 0, x, 0.0)


def all_finite(values: Tensor) -> bool:
    """Whether no term of these [K] sums was NaN or infinite; on the host, elsewhere it waits."""
    return math.isfinite(sum(values.tolist()))


def weighted_sums(x: Tensor, w: Tensor) -> Tensor:
    """out[k] = Σ_t w[t]·x[k, t], float64 [K]."""
    if x.is_cpu:
        # Selecting costs more than the sum; it matters only where a masked value is not finite.
        sums = x.to(torch.float64) @ w
        if all_finite(sums):
            return sums
    return selected(x, w).to(torch.float64) @ w


def weighted_sums_backward(grad: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """dx[k, t] = grad[k]·w[t], [K, T] in `dtype`; 0 where w is, even if grad is infinite."""
    dx = torch.outer(grad, w)
    if not (grad.is_cpu and all_finite(grad)):
        dx = selected(dx, w)
    return dx.to(dtype)


def token_weights(masks: Tensor, denoms: Tensor, sources: Tensor, samples: Tensor) -> Tensor:
    """w[t] = m / d of the response entry at position t, float64 [T]; 0 where there is none.

    Args:
        masks: [Σ R]; denoms: float64 [B].
        sources: int64 [T] entry of `masks`, Σ R where there is none.
        samples: int64 [T] sample, B where there is none.
    """
    mask = torch.nn.functional.pad(masks.to(torch.float64), (0, 1))[sources]
    denom = torch.nn.functional.pad(denoms, (0, 1), value=1.0)[samples]
    return torch.where(mask != 0, mask / denom, 0.0)


def segment_sums(x: Tensor, w: Tensor, samples: Tensor, num_samples: int) -> tuple[Tensor, Tensor]:
    """Σ_t w[t]·x[k, t] over all samples, float64 [K], and over each one, float64 [K, B].

    Args:
        samples: int64 [T] sample of each position, B where there is none.
    """
    # float32 · float64 is float64, product by product.
    terms = selected(x, w) * w
    sums = terms.new_zeros(terms.shape[0], num_samples + 1).index_add_(1, samples, terms)
    per_sample = torch.narrow_copy(sums, 1, 0, num_samples)
    return per_sample.sum(1), per_sample


def segment_sums_backward(
    grad_total: Tensor, grad_samples: Tensor, w: Tensor, samples: Tensor, dtype: torch.dtype
) -> Tensor:
    """dx[k, t] = (grad_total[k] + grad_samples[k, sample of t])·w[t], [K, T] in `dtype`."""
    by_sample = torch.nn.functional.pad(grad_total[:, None] + grad_samples, (0, 1))
    return selected(by_sample.index_select(1, samples) * w, w).to(dtype)

"""Estimators of KL(policy ‖ reference) from the log-probabilities of sampled tokens.

With Δ = ref_logp − logp of a token that the policy sampled:

    k1 = −Δ                            unbiased; single values may be negative
    k2 = Δ²/2                          biased, small variance
    k3 = exp Δ − Δ − 1                 unbiased and never negative
    low_var = k3 clamped to [−10, 10]  what trainers call low-variance KL

Source: J. Schulman, Approximating KL Divergence, joschu.net/blog/kl-approx.html. exp sees ±20 at
most.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
LOW_VAR_BOUND = 10.0

KlEstimator = Literal["k1", "k2", "k3", "low_var"]


def kl_to_reference(log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy ‖ reference) estimated at each sampled token [T], differentiable in log_probs.

    Args:
        log_probs: [T], of the policy that sampled the tokens (or nearly so).
        ref_log_probs: [T], of the reference policy; −inf where it forbids the token.
        estimator: See the module's formulas.

    Raises:
        ValueError: Unknown estimator.
    """
    delta = ref_log_probs - log_probs
    if estimator == "k1":
        return -delta
    if estimator == "k2":
        return 0.5 * delta.square()
    if estimator not in get_args(KlEstimator):
        names = ", ".join(repr(name) for name in get_args(KlEstimator))
        raise ValueError(f"KL estimator is one of {names}, got {estimator!r}")
    k3 = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - delta - 1.0
    return k3 if estimator == "k3" else torch.clamp(k3, -LOW_VAR_BOUND, LOW_VAR_BOUND)

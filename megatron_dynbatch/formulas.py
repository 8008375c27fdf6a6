"""The formulas of policy losses, once: the composed losses and the fused operator use these.

Per token, with natural log-probabilities `logp` (now), `old` (before the update), `ref` (reference
policy), `rollout` (as the sampler reported them), advantage A; sg(·) passes no gradient. exp sees
±20 at most, and a clamped log-ratio passes no gradient:

    r  = exp(logp − old)
    x  = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high))   "clip": PPO, arXiv:1707.06347 eq. 7; unequal
                                                     bounds: DAPO's clip-higher, arXiv:2503.14476
    x  = min(x, −c·A)   where A < 0                  dual clip, arXiv:1912.09729 eq. 5
    x  = −sg(clip(r, 1−ε_low, 1+ε_high))·A·logp      "cispo": MiniMax-M1, arXiv:2506.13585 eq. 4
    x  = −A·logp                                     "reinforce": Williams, Mach. Learn. 8, 1992

    ρ  = exp(old − rollout)
    ω  = min(ρ, high)                                "truncate": truncated importance sampling,
                                                     E. Ionides, J. Comp. Graph. Stat. 17(2), 2008
    ω  = ρ if low ≤ ρ ≤ high else 0                  "mask": IcePop, arXiv:2510.18855

    Δ  = ref − logp
    kl = −Δ                                          "k1": unbiased, single values may be negative
    kl = Δ²/2                                        "k2": biased, small variance
    kl = exp(Δ) − Δ − 1                              "k3": unbiased and never negative
    kl = k3 clamped to ±10                           "low_var": low-variance KL of trainers
                                                     Schulman, joschu.net/blog/kl-approx.html

All tensors are [T], of one floating dtype; every function is differentiable unless it says no.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
LOW_VAR_BOUND = 10.0

KlEstimator = Literal["k1", "k2", "k3", "low_var"]
ImportanceMode = Literal["truncate", "mask"]


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """A log-ratio within ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio within ±20."""
    return clamp_log_ratio(log_ratio).exp()


def approx_kl(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """r − 1 − log r of each token, an estimate of KL(old ‖ now); r = exp_clamped(log_ratio)."""
    return ratio - 1.0 - clamp_log_ratio(log_ratio)


def clip_term(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x of "clip".

    Args:
        ratio: r.
        advantages: A.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c, or None.

    Returns:
        x, and bool: where a clip bound decides, where the dual clip does.
    """
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is None:
        return loss, clipped, torch.zeros_like(clipped)
    bound = -dual_clip * advantages
    over = (advantages < 0) & (loss > bound)
    return torch.where(over, bound, loss), clipped, over


def cispo_factor(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """What "cispo" multiplies logp by, without gradient, and where a bound decides (bool)."""
    ratio = ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages, weight != ratio


def reinforce_factor(advantages: Tensor) -> Tensor:
    """What "reinforce" multiplies logp by."""
    return -advantages


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
    k3 = exp_clamped(delta) - delta - 1.0
    return k3 if estimator == "k3" else torch.clamp(k3, -LOW_VAR_BOUND, LOW_VAR_BOUND)


def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mode: ImportanceMode,
    bounds: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Weight ω of each token's policy term, from trainer to sampler.

    Args:
        log_probs: [T], of the trainer's policy that stands in the ratio's denominator.
        rollout_log_probs: [T], as the sampler reported them.
        mode: See the module's formulas.
        bounds: (low, high); truncation reads only high.

    Returns:
        ω [T] without gradient, and where a bound decides [T] bool.

    Raises:
        ValueError: Unknown mode or bounds out of order.
    """
    low, high = bounds
    if not 0 <= low <= high or high <= 0:
        raise ValueError(f"importance bounds must be 0 ≤ low ≤ high, high > 0, got {bounds}")
    ratio = exp_clamped((log_probs - rollout_log_probs).detach())
    if mode == "truncate":
        return ratio.clamp(max=high), ratio > high
    if mode == "mask":
        outside = (ratio < low) | (ratio > high)
        return torch.where(outside, 0.0, ratio), outside
    raise ValueError(f"importance correction is 'truncate' or 'mask', got {mode!r}")

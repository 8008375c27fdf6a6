"""Corrections for tokens that another engine, or an older policy, sampled.

The sampler's log-probs are the column `rollout_log_probs`. Whatever is weighed down or masked
away here still counts in the denominators d and B of the step: these are fixed from the loss masks
before anything is packed, so the step's loss is the sum of what is kept over all that was sampled.
"""

from typing import Literal

import torch
from torch import Tensor

from megatron_dynbatch.losses.kl import MAX_LOG_RATIO

ImportanceMode = Literal["truncate", "mask"]


def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mode: ImportanceMode,
    bounds: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Weight of each token's policy term, from trainer to sampler: ρ = exp(logp − rollout_logp).

        truncate:  ρ̂ = min(ρ, high)                 truncated importance sampling (TIS);
                                                     E. Ionides, J. Comp. Graph. Stat. 17(2), 2008
        mask:      ρ̂ = ρ if low ≤ ρ ≤ high else 0   IcePop, arXiv:2510.18855

    Args:
        log_probs: [T], of the trainer's policy that stands in the ratio's denominator.
        rollout_log_probs: [T], as the sampler reported them.
        mode: Which of the two.
        bounds: (low, high); truncation reads only high.

    Returns:
        ρ̂ [T] without gradient, and 1 where a bound decided [T].

    Raises:
        ValueError: Unknown mode or bounds out of order.
    """
    low, high = bounds
    if not 0 <= low <= high or high <= 0:
        raise ValueError(f"importance bounds must be 0 ≤ low ≤ high, high > 0, got {bounds}")
    ratio = (log_probs - rollout_log_probs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode == "truncate":
        return ratio.clamp(max=high), (ratio > high).to(ratio.dtype)
    if mode == "mask":
        outside = (ratio < low) | (ratio > high)
        return torch.where(outside, 0.0, ratio), outside.to(ratio.dtype)
    raise ValueError(f"importance correction is 'truncate' or 'mask', got {mode!r}")


def off_policy_mask(mean_log_ratio: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """1 at tokens of sequences that moved too far from the policy that sampled them, [T].

    Where A < 0 and (1/n_i)·Σ_t (old_logp − logp) > δ: off-policy sequence masking,
    DeepSeek-V3.2, arXiv:2512.02556. Good answers are kept, however far they are.

    Args:
        mean_log_ratio: [T], the mean of logp − old_logp over each token's sample.
        advantages: [T].
        threshold: δ, in nats per token.
    """
    return ((advantages < 0) & (-mean_log_ratio > threshold)).to(advantages.dtype)

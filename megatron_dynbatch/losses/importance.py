"""Corrections for tokens that another engine, or an older policy, sampled.

The sampler's log-probs are the column `rollout_log_probs`. Whatever is weighed down or masked
away here still counts in the denominators d and B of the step: these are fixed from the loss masks
before anything is packed, so the step's loss is the sum of what is kept over all that was sampled.
"""

from torch import Tensor

from megatron_dynbatch.formulas import ImportanceMode, importance_weights

__all__ = ["ImportanceMode", "importance_weights", "off_policy_mask"]


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

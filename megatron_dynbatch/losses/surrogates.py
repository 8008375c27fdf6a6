"""The policy term of each token, for autograd, and what it reports.

`clip`, `cispo` and `reinforce` are those of `formulas.py`. Two more need the token's whole sample.
With log-ratio δ = logp − old_logp clamped to ±20, r = exp δ, advantage A, δ̄ the mean of δ over the
trained tokens of the token's sample, sg(·) a value without gradient:

    gspo       `clip` with s = exp(sg(δ̄) + δ − sg(δ)) for r     arXiv:2507.18071 eq. 7 and 14
    gmpo       x = −A·exp(sg(δ̄') + δ' − sg(δ'))                 arXiv:2507.20673
               δ' = min(δ, ε_high) where A > 0, max(δ, −ε_low) where A < 0

For one advantage per sample the gradients of both are those of their papers' sequence ratios,
without any rank holding a whole sequence: δ̄ is a constant of the token, and its own δ carries the
gradient. exp sees ±20 at most, everywhere.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_dynbatch.formulas import (
    MAX_LOG_RATIO,
    approx_kl,
    cispo_factor,
    clamp_log_ratio,
    clip_term,
    exp_clamped,
    reinforce_factor,
)

Surrogate = Literal["clip", "cispo", "gspo", "gmpo", "reinforce"]
SEQUENCE_SURROGATES = ("gspo", "gmpo")


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token values [T] of the policy term; without gradient, the first apart.

    Attributes:
        loss: x of the module's formulas, differentiable in the log-probs.
        ratio: r (of `gspo` and `gmpo` the sequence ratio).
        approx_kl: r − 1 − δ of the token, an estimate of KL(old ‖ new).
        clipped: 1 where a clip bound decided.
        dual_clipped: 1 where the dual clip did.
        ratio_clamped: 1 where the token's log-ratio lay outside ±20.
    """

    loss: Tensor
    ratio: Tensor
    approx_kl: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    ratio_clamped: Tensor


def policy_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    surrogate: Surrogate = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    mean_log_ratio: Tensor | None = None,
) -> PolicyTerms:
    """The policy term of each token; all tensors [T]. See `formulas` and the module's own.

    Args:
        log_probs: logp, with gradient.
        old_log_probs: old_logp.
        advantages: A.
        surrogate: Which formula.
        clip_low: ε_low.
        clip_high: ε_high.
        dual_clip: c, or None.
        mean_log_ratio: δ̄ (`gspo`) or δ̄' (`gmpo`) at each token, without gradient.
    """
    raw = log_probs - old_log_probs
    log_ratio = clamp_log_ratio(raw)
    nowhere = torch.zeros_like(raw, dtype=torch.bool)
    clipped, dual_clipped = nowhere, nowhere
    if surrogate in SEQUENCE_SURROGATES:
        assert mean_log_ratio is not None, "sequence surrogates need the mean of each sample"
        own = raw
        if surrogate == "gmpo":
            own = bounded_log_ratio(raw, advantages, clip_low, clip_high)
            clipped = own != raw
        log_ratio = _sequence_log_ratio(own, mean_log_ratio.to(raw.dtype))
    ratio = log_ratio.exp()
    if surrogate in ("clip", "gspo"):
        loss, clipped, dual_clipped = clip_term(ratio, advantages, clip_low, clip_high, dual_clip)
    elif surrogate == "cispo":
        factor, clipped = cispo_factor(ratio, advantages, clip_low, clip_high)
        loss = factor * log_probs
    elif surrogate == "gmpo":
        loss = -advantages * ratio
    else:
        loss = reinforce_factor(advantages) * log_probs
    token = raw.detach()
    return PolicyTerms(
        loss=loss,
        ratio=ratio.detach(),
        approx_kl=approx_kl(token, exp_clamped(token)),
        clipped=clipped.to(raw.dtype),
        dual_clipped=dual_clipped.to(raw.dtype),
        ratio_clamped=(token.abs() > MAX_LOG_RATIO).to(raw.dtype),
    )


def bounded_log_ratio(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """δ' of `gmpo`: the harmful side of each token's log-ratio is bounded, in log space."""
    above = (advantages > 0) & (log_ratio > high)
    below = (advantages < 0) & (log_ratio < -low)
    return torch.where(above, high, torch.where(below, -low, log_ratio))


def _sequence_log_ratio(own: Tensor, mean: Tensor) -> Tensor:
    """sg(mean) + own − sg(own): the value of the mean, the gradient of the token's own."""
    clamped = clamp_log_ratio(mean)
    # A clamped ratio has no gradient, and neither has an infinite log-ratio (inf − inf is NaN).
    flows = (clamped == mean) & own.isfinite()
    finite = torch.where(flows, own, 0.0)
    return clamped + finite - finite.detach()

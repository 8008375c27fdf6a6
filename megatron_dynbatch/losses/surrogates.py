"""The policy term of each token: the formulas, for autograd, and what they report.

Per trained token with log-ratio δ = logp − old_logp clamped to ±20, r = exp δ, advantage A, δ̄ the
mean of δ over the trained tokens of the token's sample, sg(·) a value without gradient:

    clip       x = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high))     PPO, arXiv:1707.06347 eq. 7
               x = min(x, −c·A)  where A < 0, with a dual clip  arXiv:1912.09729 eq. 5
    cispo      x = −sg(clip(r, 1−ε_low, 1+ε_high))·A·logp       arXiv:2506.13585 eq. 4
    gspo       `clip` with s = exp(sg(δ̄) + δ − sg(δ)) for r     arXiv:2507.18071 eq. 7 and 14
    gmpo       x = −A·exp(sg(δ̄') + δ' − sg(δ'))                 arXiv:2507.20673
               δ' = min(δ, ε_high) where A > 0, max(δ, −ε_low) where A < 0
    reinforce  x = −A·logp                                      Williams, Mach. Learn. 8, 1992

Unequal bounds are DAPO's clip-higher (arXiv:2503.14476 eq. 8). For one advantage per sample the
gradients of `gspo` and `gmpo` are those of their papers' sequence ratios, without any rank holding
a whole sequence: δ̄ is a constant of the token, and its own δ carries the gradient.
exp sees ±20 at most, everywhere.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_dynbatch.losses.kl import MAX_LOG_RATIO

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
    """The policy term of each token; all tensors [T]. See the module's formulas.

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
    token = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # log_ratio − sg(log_ratio) is 0 with the gradient of the token's own log-ratio.
    log_ratio, clipped = token, torch.zeros_like(raw, requires_grad=False)
    if surrogate in SEQUENCE_SURROGATES:
        assert mean_log_ratio is not None, "sequence surrogates need the mean of each sample"
        own = raw
        if surrogate == "gmpo":
            own = bounded_log_ratio(raw, advantages, clip_low, clip_high)
            clipped = (own != raw).to(raw.dtype)
        log_ratio = _sequence_log_ratio(own, mean_log_ratio.to(raw.dtype))
    ratio = log_ratio.exp()
    dual_clipped = torch.zeros_like(clipped)
    if surrogate in ("clip", "gspo"):
        loss, clipped, dual_clipped = _clipped_surrogate(
            ratio, advantages, clip_low, clip_high, dual_clip
        )
    elif surrogate == "cispo":
        weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
        clipped = (weight != ratio.detach()).to(raw.dtype)
        loss = -weight * advantages * log_probs
    elif surrogate == "gmpo":
        loss = -advantages * ratio
    else:
        loss = -advantages * log_probs
    delta = token.detach()
    return PolicyTerms(
        loss=loss,
        ratio=ratio.detach(),
        approx_kl=delta.exp() - 1.0 - delta,
        clipped=clipped,
        dual_clipped=dual_clipped,
        ratio_clamped=(raw.detach().abs() > MAX_LOG_RATIO).to(raw.dtype),
    )


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x of `clip`, and 1 where the clip and where the dual clip decided."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    loss = torch.maximum(plain, bounded)
    clipped = (bounded > plain).to(loss.dtype)
    if dual_clip is None:
        return loss, clipped, torch.zeros_like(clipped)
    bound = -dual_clip * advantages
    over = (advantages < 0) & (loss > bound)
    return torch.where(over, bound, loss), clipped, over.to(loss.dtype)


def bounded_log_ratio(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """δ' of `gmpo`: the harmful side of each token's log-ratio is bounded, in log space."""
    above = (advantages > 0) & (log_ratio > high)
    below = (advantages < 0) & (log_ratio < -low)
    return torch.where(above, high, torch.where(below, -low, log_ratio))


def _sequence_log_ratio(own: Tensor, mean: Tensor) -> Tensor:
    """sg(mean) + own − sg(own): the value of the mean, the gradient of the token's own."""
    clamped = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # A clamped ratio has no gradient, and neither has an infinite log-ratio (inf − inf is NaN).
    flows = (clamped == mean) & own.isfinite()
    finite = torch.where(flows, own, 0.0)
    return clamped + finite - finite.detach()

"""Clipped policy-gradient loss of reinforcement learning from rollouts.

Per trained token with log-ratio δ = logp − old_logp clamped to ±20, r = exp δ, advantage A:

    x = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high))        PPO, arXiv:1707.06347 eq. 7
    x = min(x, −c·A)  where A < 0                       dual clip, arXiv:1912.09729 eq. 5
    x += β·kl  with Δ = ref_logp − logp
        k1 = −Δ,  k2 = Δ²/2,  k3 = exp Δ − Δ − 1        Schulman, joschu.net/blog/kl-approx.html

The unequal bounds are DAPO's clip-higher (arXiv:2503.14476). exp sees ±20 at most, everywhere.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.losses.sft import token_log_probs

MAX_LOG_RATIO = 20.0

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class PolicyTerms:
    """Per-token values [T] of the clipped policy loss; all 0 at tokens not kept.

    Attributes:
        loss: The clipped surrogate, differentiable in the log-probs.
        ratio: exp of the clamped log-ratio.
        approx_kl: r − 1 − δ, an estimate of KL(old ‖ new).
        clipped: 1 where the clip decided the loss.
        dual_clipped: 1 where the dual clip did.
        ratio_clamped: 1 where the log-ratio lay outside ±20.
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
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """The clipped surrogate of each token; all arguments [T]. See the module's formulas."""
    raw = log_probs - old_log_probs
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, bounded)
    dual_clipped = torch.zeros_like(loss)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        over = (advantages < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        dual_clipped = over.to(loss.dtype)
    return PolicyTerms(
        loss=loss,
        ratio=ratio.detach(),
        approx_kl=(ratio - 1.0 - log_ratio).detach(),
        clipped=(bounded > plain).to(loss.dtype),
        dual_clipped=dual_clipped,
        ratio_clamped=(raw.abs() > MAX_LOG_RATIO).to(loss.dtype),
    )


def kl_to_reference(log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy ‖ reference) estimated at each sampled token [T], differentiable in log_probs."""
    delta = ref_log_probs - log_probs
    if estimator == "k1":
        return -delta
    if estimator == "k2":
        return 0.5 * delta.square()
    if estimator == "k3":
        return delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() - delta - 1.0
    raise ValueError(f"KL estimator is 'k1', 'k2' or 'k3', got {estimator!r}")


def policy(
    output: Tensor,
    microbatch: MicroBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: KlEstimator | None = None,
    kl_coef: float = 0.0,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss on the columns `log_probs` (old policy) and `advantages`.

    Args:
        output: Logits or token losses, see `token_log_probs`.
        microbatch: Gives the columns, and `ref_log_probs` if `kl` is set.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.
        dual_clip: c > 1; None: no dual clip.
        kl: Estimator of the KL to the reference policy; None: neither reported nor in the loss.
        kl_coef: β; with 0 the KL is reported but is no part of the graph.
        temperature: Temperature the responses were sampled at.
        tp_group: Tensor-parallel group of vocabulary-parallel logits.

    Returns:
        l = Σ w·x, 0-d float64, and local weighted sums (detached): "loss", "pg_loss",
        "clip_fraction", "dual_clip_fraction", "approx_kl", "ratio", "ratio_clamped" and, with
        `kl`, "kl". Which keys there are depends on the options alone, never on the data.

    Raises:
        ValueError: An option out of range, or a column that the samples do not have.
    """
    if clip_low < 0 or clip_high < 0 or (dual_clip is not None and dual_clip <= 1):
        raise ValueError(
            f"clip bounds must be ≥ 0 and dual_clip > 1, got {clip_low}, {clip_high}, {dual_clip}"
        )
    if kl is None and kl_coef:
        raise ValueError(
            f"kl_coef is {kl_coef} but no KL estimator is chosen; set kl to k1, k2, k3"
        )
    log_probs, _ = token_log_probs(output, microbatch, temperature=temperature, tp_group=tp_group)
    # Selected before any arithmetic: 0·NaN in a backward pass would be NaN again.
    keep = microbatch.token_weights != 0

    def kept(x: Tensor) -> Tensor:
        return torch.where(keep, x, 0.0)

    log_probs = kept(log_probs)
    terms = policy_terms(
        log_probs,
        kept(microbatch.column("log_probs")),
        kept(microbatch.column("advantages")),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    token_loss = terms.loss
    metrics = {
        "pg_loss": terms.loss.detach(),
        "clip_fraction": terms.clipped,
        "dual_clip_fraction": terms.dual_clipped,
        "approx_kl": terms.approx_kl,
        "ratio": terms.ratio,
        "ratio_clamped": terms.ratio_clamped,
    }
    if kl is not None:
        policy_side = log_probs if kl_coef else log_probs.detach()
        token_kl = kl_to_reference(policy_side, kept(microbatch.column("ref_log_probs")), kl)
        metrics["kl"] = token_kl.detach()
        if kl_coef:
            token_loss = token_loss + kl_coef * token_kl
    sums = microbatch.sums({"loss": token_loss, **metrics})
    return sums["loss"], {name: value.detach() for name, value in sums.items()}

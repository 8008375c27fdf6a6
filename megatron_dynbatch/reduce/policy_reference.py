"""The definition of the fused policy loss: terms of `formulas`, and the gradient in closed form.

With its symbols, entropy H, and pg the term of the surrogate:

    x = ω·pg + β·kl − η·H

β = 0 and η = 0 leave their term out of x and of the gradient; it is reported all the same. ω = 0
changes no denominator: such a token stays in d.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from megatron_dynbatch.formulas import (
    LOW_VAR_BOUND,
    MAX_LOG_RATIO,
    ImportanceMode,
    KlEstimator,
    approx_kl,
    cispo_factor,
    clip_term,
    exp_clamped,
    importance_weights,
    kl_to_reference,
    reinforce_factor,
)

METRICS = (
    "loss",
    "pg_loss",
    "clip_fraction",
    "dual_clip_fraction",
    "approx_kl",
    "ratio",
    "ratio_clamped",
    "kl",
    "entropy",
    "importance_weight",
    "importance_fraction",
)
"""Rows of the result, each Σ w·(…): x; pg; clip decides pg; dual clip does; r − 1 − log r, an
estimate of KL(old ‖ now); r; log-ratio outside ±20; kl; H; ω; a bound decides ω."""

SURROGATES = ("clip", "cispo", "reinforce")
KL_ESTIMATORS: tuple[KlEstimator | None, ...] = (None, *get_args(KlEstimator))
IMPORTANCE_MODES: tuple[ImportanceMode | None, ...] = (None, *get_args(ImportanceMode))


@dataclass(frozen=True)
class PolicyFormula:
    """What the fused policy loss is made of; symbols of `formulas`.

    Attributes:
        surrogate: One of `SURROGATES`.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.
        dual_clip: c > 1, with "clip" only; None: no dual clip.
        kl: Estimator of the KL to the reference policy, or None.
        kl_coef: β.
        entropy_coef: η.
        importance: How rollout log-probs are corrected for, or None.
        importance_bounds: (low, high) of ρ; truncation reads only high.

    Raises:
        ValueError: A value out of range or a choice that does not exist, naming it.
    """

    surrogate: str = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance: str | None = None
    importance_bounds: tuple[float, float] = (0.5, 2.0)

    def __post_init__(self) -> None:
        for name, choices in (
            ("surrogate", SURROGATES),
            ("kl", KL_ESTIMATORS),
            ("importance", IMPORTANCE_MODES),
        ):
            if getattr(self, name) not in choices:
                wanted = ", ".join(repr(c) for c in choices)
                raise ValueError(f"{name} is one of {wanted}, got {getattr(self, name)!r}")
        if self.clip_low < 0 or self.clip_high < 0:
            raise ValueError(f"clip bounds must be ≥ 0, got {self.clip_low} and {self.clip_high}")
        if self.dual_clip is not None and (self.dual_clip <= 1 or self.surrogate != "clip"):
            raise ValueError(
                f"dual_clip must be > 1 and goes with surrogate 'clip', got {self.dual_clip} "
                f"with {self.surrogate!r}"
            )
        if self.kl is None and self.kl_coef:
            raise ValueError(f"kl_coef is {self.kl_coef} but kl is None; choose an estimator")
        low, high = self.importance_bounds
        if not 0 <= low <= high or high <= 0:
            raise ValueError(f"importance_bounds must be 0 ≤ low ≤ high, high > 0: {low}, {high}")

    def scalars(self) -> tuple[int, float, float, float, int, float, float, int, float, float]:
        """The fields as the operator takes them: choices by index; a dual clip of 0 is none."""
        return (
            SURROGATES.index(self.surrogate),
            float(self.clip_low),
            float(self.clip_high),
            float(self.dual_clip or 0.0),
            KL_ESTIMATORS.index(self.kl),
            float(self.kl_coef),
            float(self.entropy_coef),
            IMPORTANCE_MODES.index(self.importance),
            float(self.importance_bounds[0]),
            float(self.importance_bounds[1]),
        )


def policy_terms(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    w: Tensor,
    ref: Tensor | None,
    rollout: Tensor | None,
    entropy: Tensor | None,
    surrogate: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    kl: int,
    kl_coef: float,
    entropy_coef: float,
    importance: int,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Terms float64 [11, T] in the order of `METRICS`, and w·∂x/∂logp [T].

    All tensors [T]; w float64. Positions of weight 0 are selected away before any arithmetic.
    """
    keep = w != 0
    dtype = torch.promote_types(logp.dtype, torch.float32)

    def kept(x: Tensor) -> Tensor:
        return torch.where(keep, x, 0.0).to(dtype)

    logp, old, advantage = kept(logp), kept(old), kept(advantages)
    raw = logp - old
    ratio, inside = exp_clamped(raw), raw.abs() <= MAX_LOG_RATIO
    clip = (clip_low, clip_high, dual_clip or None)
    pg, slope, clipped, dual_clipped = _surrogate(
        SURROGATES[surrogate], logp, ratio, inside, advantage, *clip
    )
    zero = torch.zeros_like(logp)
    omega, bounded = torch.ones_like(logp), torch.zeros_like(keep)
    mode, estimator = IMPORTANCE_MODES[importance], KL_ESTIMATORS[kl]
    if mode is not None and rollout is not None:
        omega, bounded = importance_weights(old, kept(rollout), mode, (low, high))
        pg, slope = omega * pg, omega * slope

    loss, token_kl, token_entropy = pg, zero, zero
    if estimator is not None and ref is not None:
        token_kl = kl_to_reference(logp, kept(ref), estimator)
        if kl_coef:
            kl_slope = _kl_slope(logp, kept(ref), estimator)
            loss, slope = loss + kl_coef * token_kl, slope + kl_coef * kl_slope
    if entropy is not None:
        token_entropy = kept(entropy)
        if entropy_coef:
            loss = loss - entropy_coef * token_entropy
    old_kl = approx_kl(raw, ratio)
    rows = [loss, pg, clipped, dual_clipped, old_kl, ratio, ~inside, token_kl, token_entropy]
    terms = torch.stack([row.to(torch.float64) for row in (*rows, omega, bounded)])
    return torch.where(keep, terms, 0.0), (slope * w).to(dtype)


def _surrogate(
    name: str,
    logp: Tensor,
    ratio: Tensor,
    inside: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pg and its derivative in logp, where a clip bound decided, where the dual clip did."""
    nowhere = torch.zeros_like(inside)
    if name == "reinforce":
        slope = reinforce_factor(advantage)
        return slope * logp, slope, nowhere, nowhere
    if name == "cispo":
        slope, clipped = cispo_factor(ratio, advantage, clip_low, clip_high)
        return slope * logp, slope, clipped, nowhere
    pg, clipped, dual_clipped = clip_term(ratio, advantage, clip_low, clip_high, dual_clip)
    # Where no bound decides, pg is −A·r, which is its own derivative; elsewhere it is constant.
    return pg, torch.where(inside & ~clipped & ~dual_clipped, pg, 0.0), clipped, dual_clipped


def _kl_slope(logp: Tensor, ref: Tensor, estimator: KlEstimator) -> Tensor:
    """Derivative in logp of the KL of each token."""
    delta = ref - logp
    if estimator == "k1":
        return torch.ones_like(delta)
    if estimator == "k2":
        return -delta
    slope = 1.0 - torch.where(delta.abs() <= MAX_LOG_RATIO, exp_clamped(delta), 0.0)
    if estimator == "low_var":
        k3 = kl_to_reference(logp, ref, "k3")
        slope = torch.where(k3.abs() <= LOW_VAR_BOUND, slope, 0.0)
    return slope

"""The definition of the fused policy loss: formulas, sources, and the gradient in closed form.

Per token, with natural log-probabilities `logp` (now), `old` (before the update), `ref` (reference
policy), `rollout` (as the sampler reported them), advantage A, entropy H; sg(·) passes no gradient.
Every log-ratio is clamped to ±20 before exp, and passes no gradient where the clamp acts:

    r  = exp(clamp(logp − old))
    pg = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high))   "clip": PPO, arXiv:1707.06347 eq. 7; unequal
                                                     bounds: DAPO's clip-higher, arXiv:2503.14476
    pg = min(pg, −c·A)   where A < 0                 dual clip, arXiv:1912.09729
    pg = −sg(clip(r, 1−ε_low, 1+ε_high))·A·logp      "cispo": MiniMax-M1, arXiv:2506.13585
    pg = −A·logp                                     "reinforce": Williams, Mach. Learn. 8, 1992

    ρ = exp(clamp(old − rollout)), pg ← ω·pg with
    ω = min(ρ, high)                                 "truncate": truncated importance sampling,
                                                     E. Ionides, J. Comp. Graph. Stat. 17(2), 2008
    ω = ρ if low ≤ ρ ≤ high else 0                   "mask": IcePop, arXiv:2510.18855

    Δ = ref − logp; kl = −Δ ("k1"), Δ²/2 ("k2"), exp(clamp(Δ)) − Δ − 1 ("k3"), k3 within ±10
    ("low_var")                                      Schulman, joschu.net/blog/kl-approx.html

    x = pg + β·kl − η·H

β = 0 and η = 0 leave their term out of x and of the gradient; it is reported all the same. ω = 0
changes no denominator: such a token stays in d.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0

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
KL_ESTIMATORS = (None, "k1", "k2", "k3", "low_var")
IMPORTANCE_MODES = (None, "truncate", "mask")
LOW_VAR_BOUND = 10.0


@dataclass(frozen=True)
class PolicyFormula:
    """What the fused policy loss is made of; symbols as in the module's docstring.

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


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


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
    bounds = (1.0 - clip_low, 1.0 + clip_high)
    pg, slope, clipped, dual_clipped = _surrogate(
        SURROGATES[surrogate], logp, ratio, inside, advantage, bounds, dual_clip
    )
    zero = torch.zeros_like(logp)
    omega, bounded = torch.ones_like(logp), torch.zeros_like(keep)
    if importance and rollout is not None:
        rho = exp_clamped(old - kept(rollout))
        if IMPORTANCE_MODES[importance] == "mask":
            bounded = (rho < low) | (rho > high)
            omega = torch.where(bounded, zero, rho)
        else:
            omega, bounded = rho.clamp(max=high), rho > high
        pg, slope = omega * pg, omega * slope

    loss, token_kl, token_entropy = pg, zero, zero
    if kl and ref is not None:
        token_kl, kl_slope = _kl(kept(ref) - logp, KL_ESTIMATORS[kl])
        if kl_coef:
            loss, slope = loss + kl_coef * token_kl, slope + kl_coef * kl_slope
    if entropy is not None:
        token_entropy = kept(entropy)
        if entropy_coef:
            loss = loss - entropy_coef * token_entropy
    approx_kl = ratio - 1.0 - raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rows = [loss, pg, clipped, dual_clipped, approx_kl, ratio, ~inside, token_kl, token_entropy]
    terms = torch.stack([row.to(torch.float64) for row in (*rows, omega, bounded)])
    return torch.where(keep, terms, 0.0), (slope * w).to(dtype)


def _surrogate(
    name: str,
    logp: Tensor,
    ratio: Tensor,
    inside: Tensor,
    advantage: Tensor,
    bounds: tuple[float, float],
    dual_clip: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """pg and its derivative in logp, where a clip bound decided, where the dual clip did."""
    nowhere = torch.zeros_like(inside)
    if name == "reinforce":
        return -advantage * logp, -advantage, nowhere, nowhere
    clipped_ratio = ratio.clamp(*bounds)
    if name == "cispo":
        slope = -clipped_ratio * advantage
        return slope * logp, slope, clipped_ratio != ratio, nowhere
    plain, bounded = -advantage * ratio, -advantage * clipped_ratio
    pg, clipped = torch.maximum(plain, bounded), bounded > plain
    slope = torch.where(inside & ~clipped, plain, 0.0)
    bound = -dual_clip * advantage
    dual_clipped = (advantage < 0) & (pg > bound) & (dual_clip > 0)
    return (
        torch.where(dual_clipped, bound, pg),
        torch.where(dual_clipped, 0.0, slope),
        clipped,
        dual_clipped,
    )


def _kl(delta: Tensor, estimator: str | None) -> tuple[Tensor, Tensor]:
    """KL of each token and its derivative in logp, from Δ = ref − logp."""
    if estimator == "k1":
        return -delta, torch.ones_like(delta)
    if estimator == "k2":
        return 0.5 * delta.square(), -delta
    growth = exp_clamped(delta)
    k3 = growth - delta - 1.0
    slope = 1.0 - torch.where(delta.abs() <= MAX_LOG_RATIO, growth, 0.0)
    if estimator == "low_var":
        slope = torch.where(k3.abs() <= LOW_VAR_BOUND, slope, 0.0)
        k3 = k3.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
    return k3, slope

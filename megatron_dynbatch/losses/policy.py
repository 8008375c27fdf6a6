"""Policy-gradient losses of reinforcement learning from rollouts.

The step's loss is Σ w·(ρ̂·o·x + β·kl − η·entropy) / B: x the policy term of each token
(`formulas.py`, `surrogates.py`), ρ̂ an importance weight, o the off-policy mask (`importance.py`),
kl an estimator. A term of coefficient 0 is reported but is no part of the graph.

What decides nothing per sequence runs as one fused operator of the same formulas
(`reduce.policy_loss_sums`), the rest term by term under autograd.
"""

from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.formulas import (
    ImportanceMode,
    KlEstimator,
    exp_clamped,
    importance_weights,
    kl_to_reference,
)
from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.logprob import EntropyMode
from megatron_dynbatch.losses.importance import off_policy_mask
from megatron_dynbatch.losses.on_policy import OldLogProbs
from megatron_dynbatch.losses.sequence import sequence_means
from megatron_dynbatch.losses.sft import token_log_probs
from megatron_dynbatch.losses.surrogates import (
    SEQUENCE_SURROGATES,
    Surrogate,
    bounded_log_ratio,
    policy_terms,
)
from megatron_dynbatch.reduce import PolicyFormula, policy_loss_sums
from megatron_dynbatch.report import Metric


@dataclass(frozen=True)
class PolicyOptions:
    """What `policy` computes. Which metrics it reports depends on these alone, never on the data.

    Attributes:
        surrogate: Formula of the policy term, see `formulas.py` and `surrogates.py`.
        clip_low: ε_low ≥ 0.
        clip_high: ε_high ≥ 0.
        dual_clip: c > 1, for `clip` and `gspo`; None: no dual clip.
        kl: Estimator of the KL to the reference policy; None: neither reported nor in the loss.
        kl_coef: β; with 0 the KL is reported but is no part of the graph.
        entropy_coef: η; with 0 the entropy is reported but is no part of the graph; None: it is
            not even computed. Needs logits.
        old_log_probs: Where old_logp comes from: the column `log_probs`, the column
            `rollout_log_probs`, or this very pass ("current", see `on_policy`).
        importance: Correction of old_logp against `rollout_log_probs`; None: none.
        importance_bounds: (low, high) of ρ; truncation reads only high.
        off_policy_threshold: δ of `off_policy_mask`, in nats per token; None: no such mask.
        temperature: Temperature the responses were sampled at. Needs logits unless it is 1.
        ratio_extremes: Report the smallest and the largest ratio of a token too.
        vocab_size: Token ids there are, where the model's vocabulary is padded: the sampler knows
            no padding. None: all columns of the logits count. Needs logits.
        inplace_backward: Whether the gradient may take the memory of the logits.

    Raises:
        ValueError: An option out of range, or two that contradict each other.
    """

    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: KlEstimator | None = None
    kl_coef: float = 0.0
    entropy_coef: float | None = None
    old_log_probs: OldLogProbs = "column"
    importance: ImportanceMode | None = None
    importance_bounds: tuple[float, float] = (0.5, 2.0)
    off_policy_threshold: float | None = None
    temperature: float = 1.0
    ratio_extremes: bool = False
    vocab_size: int | None = None
    inplace_backward: bool = False

    def __post_init__(self) -> None:
        for name, choice, choices in (
            ("surrogate", self.surrogate, get_args(Surrogate)),
            ("old_log_probs", self.old_log_probs, get_args(OldLogProbs)),
            ("kl", self.kl or "k1", get_args(KlEstimator)),
            ("importance", self.importance or "mask", get_args(ImportanceMode)),
        ):
            if choice not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}, got {choice!r}")
        if self.clip_low < 0 or self.clip_high < 0 or (self.dual_clip or 2.0) <= 1:
            raise ValueError(
                f"clip bounds must be ≥ 0 and dual_clip > 1, got {self.clip_low}, "
                f"{self.clip_high}, {self.dual_clip}"
            )
        if self.dual_clip is not None and self.surrogate not in ("clip", "gspo"):
            raise ValueError(f"surrogate {self.surrogate!r} has no dual clip; leave dual_clip out")
        if self.kl is None and self.kl_coef:
            raise ValueError(
                f"kl_coef is {self.kl_coef} but no KL estimator is chosen; set kl to k1, k2, k3 or "
                "low_var"
            )
        if self.importance is not None and self.old_log_probs == "rollout":
            raise ValueError(
                "importance corrects old log-probs against rollout_log_probs, but old_log_probs="
                "'rollout' makes them the same; use 'column' or 'current'"
            )

    def formula(self) -> PolicyFormula | None:
        """The same for the fused operator; None where something is decided per sequence."""
        if self.surrogate in SEQUENCE_SURROGATES or self.off_policy_threshold is not None:
            return None
        return PolicyFormula(
            surrogate=self.surrogate,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            kl=self.kl,
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef or 0.0,
            importance=self.importance,
            importance_bounds=self.importance_bounds,
        )

    @property
    def entropy_mode(self) -> EntropyMode:
        """How the entropy is computed: not at all, as a metric, or with its gradient."""
        if self.entropy_coef is None:
            return "none"
        return "grad" if self.entropy_coef else "metric"


def policy(
    output: Tensor,
    microbatch: MicroBatch,
    *,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor | Metric]]:
    """Policy loss on the columns `advantages`, `log_probs` and what else the options ask for.

    Args:
        output: Logits or token losses, see `token_log_probs`.
        microbatch: Gives the columns.
        tp_group: Tensor-parallel group of vocabulary-parallel logits.
        cp_group: Context-parallel group; needed under CP by what is decided per sequence.
        **options: Fields of `PolicyOptions`.

    Returns:
        l = Σ w·x, 0-d float64, and local weighted sums (detached) of "loss", "pg_loss",
        "clip_fraction", "dual_clip_fraction", "approx_kl", "ratio", "ratio_clamped" and, as the
        options ask for them, "kl", "entropy", "importance_weight", "importance_fraction",
        "off_policy_fraction"; "ratio_min" and "ratio_max" over the tokens of the step.

    Raises:
        ValueError: See `PolicyOptions`; a column that the samples do not have; a missing group.
    """
    chosen = PolicyOptions(**options)
    log_probs, entropy = token_log_probs(
        output,
        microbatch,
        temperature=chosen.temperature,
        vocab_size=chosen.vocab_size,
        inplace_backward=chosen.inplace_backward,
        entropy=chosen.entropy_mode,
        tp_group=tp_group,
    )
    microbatch.summed["new log-probs"] = log_probs.detach()
    formula = chosen.formula()
    if formula is None:
        sums = _term_sums(chosen, log_probs, entropy, microbatch, cp_group)
    else:
        # The operator selects masked tokens away itself.
        sums = policy_loss_sums(
            log_probs,
            _old_log_probs(chosen, log_probs, microbatch),
            microbatch.column("advantages"),
            microbatch.token_weights,
            formula,
            ref_logp=microbatch.column("ref_log_probs") if chosen.kl else None,
            rollout_logp=microbatch.column("rollout_log_probs") if chosen.importance else None,
            entropy=entropy,
        )
    report: dict[str, Tensor | Metric] = {name: x.detach() for name, x in sums.items()}
    if chosen.ratio_extremes:
        report |= _ratio_extremes(chosen, log_probs, microbatch)
    return sums["loss"], report


def _ratio_extremes(
    chosen: PolicyOptions, log_probs: Tensor, microbatch: MicroBatch
) -> dict[str, Metric]:
    raw = (log_probs - _old_log_probs(chosen, log_probs, microbatch)).detach()
    ratio = exp_clamped(raw)
    mask = microbatch.token_weights
    return {"ratio_min": Metric.least(ratio, mask), "ratio_max": Metric.largest(ratio, mask)}


def _old_log_probs(chosen: PolicyOptions, log_probs: Tensor, microbatch: MicroBatch) -> Tensor:
    if chosen.old_log_probs == "current":
        return log_probs.detach()
    name = "log_probs" if chosen.old_log_probs == "column" else "rollout_log_probs"
    return microbatch.column(name)


def _term_sums(
    chosen: PolicyOptions,
    log_probs: Tensor,
    entropy: Tensor | None,
    microbatch: MicroBatch,
    cp_group: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    """All sums, term by term."""
    # Selected before any arithmetic: 0·NaN in a backward pass would be NaN again.
    keep = microbatch.token_weights != 0
    dtype = torch.promote_types(log_probs.dtype, torch.float32)

    def kept(x: Tensor) -> Tensor:
        return torch.where(keep, x, 0.0).to(dtype)

    log_probs = kept(log_probs)
    old = kept(_old_log_probs(chosen, log_probs, microbatch))
    rollout = None
    if chosen.importance is not None:
        rollout = kept(microbatch.column("rollout_log_probs"))
    token_loss, metrics = _policy_term(
        chosen, log_probs, old, rollout, kept(microbatch.column("advantages")), microbatch, cp_group
    )
    if chosen.kl is not None:
        # With coefficient 0 the graph must not see the KL: 0·inf would be NaN.
        policy_side = log_probs if chosen.kl_coef else log_probs.detach()
        reference = kept(microbatch.column("ref_log_probs"))
        token_kl = kl_to_reference(policy_side, reference, chosen.kl)
        metrics["kl"] = token_kl.detach()
        if chosen.kl_coef:
            token_loss = token_loss + chosen.kl_coef * token_kl
    if entropy is not None:
        entropy = kept(entropy)
        metrics["entropy"] = entropy.detach()
        if chosen.entropy_coef:
            token_loss = token_loss - chosen.entropy_coef * entropy
    return microbatch.sums({"loss": token_loss, **metrics})


def _policy_term(
    chosen: PolicyOptions,
    log_probs: Tensor,
    old: Tensor,
    rollout: Tensor | None,
    advantages: Tensor,
    microbatch: MicroBatch,
    cp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """ρ̂·o·x of each token, and the metrics that belong to it."""
    log_ratio = (log_probs - old).detach()
    wanted = {}
    if chosen.surrogate == "gmpo":
        wanted["ratio"] = bounded_log_ratio(
            log_ratio, advantages, chosen.clip_low, chosen.clip_high
        )
    elif chosen.surrogate == "gspo":
        wanted["ratio"] = log_ratio
    if chosen.off_policy_threshold is not None:
        wanted["distance"] = log_ratio
    means = sequence_means(wanted, microbatch, cp_group) if wanted else {}
    terms = policy_terms(
        log_probs,
        old,
        advantages,
        surrogate=chosen.surrogate,
        clip_low=chosen.clip_low,
        clip_high=chosen.clip_high,
        dual_clip=chosen.dual_clip,
        mean_log_ratio=means.get("ratio"),
    )
    loss = terms.loss
    metrics = {
        "clip_fraction": terms.clipped,
        "dual_clip_fraction": terms.dual_clipped,
        "approx_kl": terms.approx_kl,
        "ratio": terms.ratio,
        "ratio_clamped": terms.ratio_clamped,
    }
    if chosen.importance is not None and rollout is not None:
        weight, bounded = importance_weights(
            old, rollout, chosen.importance, chosen.importance_bounds
        )
        loss = loss * weight
        metrics |= {"importance_weight": weight, "importance_fraction": bounded.to(weight.dtype)}
    if chosen.off_policy_threshold is not None:
        masked = off_policy_mask(means["distance"], advantages, chosen.off_policy_threshold)
        loss = torch.where(masked != 0, 0.0, loss)
        metrics["off_policy_fraction"] = masked
    return loss, {"pg_loss": loss.detach(), **metrics}

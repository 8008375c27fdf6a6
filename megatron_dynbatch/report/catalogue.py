"""Every metric that the package reports: its name, kind and unit, in one place.

`train/…` belongs to an optimizer step, `rollout/…` to a batch of rollouts. The names here are
without that prefix; what a loss of one's own reports is a mean under the step's reduction unless
it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dynbatch.report.metric import Kind


@dataclass(frozen=True)
class MetricSpec:
    """What a metric is.

    Attributes:
        kind: How contributions meet, see `metric`.
        unit: Of the value; "" for a ratio or a plain number.
        meaning: One line.
    """

    kind: Kind
    unit: str
    meaning: str


def _mean(unit: str, meaning: str) -> MetricSpec:
    return MetricSpec("mean", unit, meaning)


LOSS: dict[str, MetricSpec] = {
    "lm loss": _mean("nats", "cross entropy (`sft`)"),
    "loss": _mean("", "the step's objective"),
    "pg_loss": _mean("", "policy term, importance weights and masks applied"),
    "clip_fraction": _mean("", "tokens where a clip bound decided"),
    "dual_clip_fraction": _mean("", "tokens where the dual clip decided"),
    "approx_kl": _mean("nats", "r − 1 − log r, an estimate of KL(old ‖ new)"),
    "ratio": _mean("", "importance ratio of new to old policy"),
    "ratio_min": MetricSpec("min", "", "smallest ratio of a token"),
    "ratio_max": MetricSpec("max", "", "largest ratio of a token"),
    "ratio_clamped": _mean("", "tokens whose log-ratio lay outside ±20"),
    "kl": _mean("nats", "KL to the reference policy, by the chosen estimator"),
    "entropy": _mean("nats", "entropy of the policy at each token"),
    "importance_weight": _mean("", "weight against the sampler's log-probs, bounds applied"),
    "importance_fraction": _mean("", "tokens where an importance bound decided"),
    "off_policy_fraction": _mean("", "tokens of sequences masked as too far off-policy"),
    "value_loss": _mean("", "clipped squared error of the value head"),
    "value_clip_fraction": _mean("", "tokens where the value clip decided"),
    "value": _mean("", "value estimate"),
    "return": _mean("", "value target"),
}
"""Reported by losses; means are under the step's reduction: Σ w·x / B."""

STEP: dict[str, MetricSpec] = {
    "step_global_batch_size": MetricSpec("count", "rollouts", "G"),
    "num_samples": MetricSpec("count", "samples", "S"),
    "num_microbatches": MetricSpec("count", "micro-batches", "M, per data-parallel rank"),
    "num_dummies": MetricSpec("count", "micro-batches", "dummies over all data-parallel ranks"),
    "num_oversize": MetricSpec("count", "samples", "longer than a micro-batch may be"),
    "num_tokens": MetricSpec("count", "tokens", "of the samples, padding not counted"),
    "num_trained_tokens": MetricSpec("count", "tokens", "N, the sum of all masks"),
    "fill": _mean("", "tokens of the samples over what the micro-batches could hold"),
    "balance": _mean("", "most loaded rank over the bound that no placement beats"),
    "lockstep": _mean("", "what a collective per micro-batch across ranks pays, 1 is ideal"),
    "predicted_time": MetricSpec("sum", "cost", "step time by the cost model, in its unit"),
    "step_time": MetricSpec("sum", "seconds", "measured between the ends of two steps"),
    "wait_time": MetricSpec("sum", "seconds", "of it, waiting for rollouts"),
}
"""One value per step, from its plan."""

ROLLOUT: dict[str, MetricSpec] = {
    "num_rollouts": MetricSpec("count", "rollouts", "rollouts of the batch"),
    "num_samples": MetricSpec("count", "samples", "training sequences of the batch"),
    "num_groups": MetricSpec("count", "groups", "prompt groups"),
    "samples_per_rollout": _mean("samples", "fan-out"),
    "response_length": _mean("tokens", "response tokens of a rollout, all its samples"),
    "response_length_max": MetricSpec("max", "tokens", "the longest rollout's"),
    "response_length_per_sample": _mean("tokens", "response tokens of a sample"),
    "response_length_per_sample_max": MetricSpec("max", "tokens", "the longest sample's"),
    "total_length_per_sample": _mean("tokens", "prompt and response tokens of a sample"),
    "trained_tokens": _mean("tokens", "trained tokens of a rollout"),
    "untrained_rollouts": _mean("", "rollouts without any trained token"),
    "truncated": _mean("", "rollouts with a sample that was cut off"),
    "truncated_per_sample": _mean("", "samples that were cut off"),
    "turns": _mean("calls", "calls of the model in a rollout"),
    "turns_max": MetricSpec("max", "calls", "the rollout with the most"),
    "reward": _mean("", "reward of a rollout"),
    "reward_std": MetricSpec("std", "", "over all rollouts of the batch, population"),
    "reward_min": MetricSpec("min", "", "lowest reward"),
    "reward_max": MetricSpec("max", "", "highest reward"),
    "unscored_rollouts": _mean("", "rollouts without reward"),
    "constant_groups": _mean("", "groups of several rollouts whose rewards do not differ"),
    "pass@k": _mean("", "1 − C(n−c, k)/C(n, k), over groups of at least k rollouts"),
    "pass@k_groups": MetricSpec("count", "groups", "groups of at least k rollouts"),
}
"""What `rollout_report` makes; k stands for each k asked for."""

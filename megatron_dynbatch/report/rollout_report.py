"""What a batch of rollouts is like: rewards, lengths, truncation, pass@k, turns.

Means are per rollout unless the name ends in `_per_sample`; a rollout with siblings counts once.
Results are metrics, so batches scored by several processes may be merged, as long as no rollout
and no prompt group is split between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_dynbatch.report.metric import Metric
from megatron_dynbatch.rollouts import Sample, SampleIndex
from megatron_dynbatch.rollouts.advantages import NEAR_CONSTANT

PASS_AT = (1, 2, 4, 8)


def rollout_report(
    samples: Sequence[Sample],
    *,
    truncated: ArrayLike | None = None,
    turns: ArrayLike | None = None,
    solved: ArrayLike | None = None,
    pass_at: Sequence[int] = PASS_AT,
) -> dict[str, Metric]:
    """Metrics of a batch, under the names of `catalogue.ROLLOUT`.

    Args:
        samples: The batch's samples, rewards where there are any.
        truncated: [S] whether the sample was cut off by a length limit. A rollout is truncated if
            any of its samples is.
        turns: [S] calls of the model that led to the sample. A rollout's are the sum.
        solved: [S] whether the sample's rollout solved its task, equal for siblings; default: its
            reward is at least 1. For `pass@k`.
        pass_at: k of each `pass@k`. Which names there are depends on the arguments given alone.

    Raises:
        ValueError: An argument of another length than the samples.
    """
    index = SampleIndex.from_samples(samples)
    rollout, count = index.rollout_indices, index.num_rollouts
    given = _columns(len(samples), truncated=truncated, turns=turns, solved=solved)

    def per_rollout(values: ArrayLike) -> NDArray[np.float64]:
        return np.bincount(rollout, np.asarray(values, np.float64), minlength=count)

    lengths, trained = per_rollout(index.response_lengths), per_rollout(index.mask_sums)
    report = {
        "num_rollouts": Metric.count(count),
        "num_samples": Metric.count(len(samples)),
        "num_groups": Metric.count(index.num_groups),
        "samples_per_rollout": Metric.mean(len(samples), count),
        "response_length": Metric.mean_of(lengths),
        "response_length_max": _largest(lengths),
        "response_length_per_sample": Metric.mean_of(index.response_lengths),
        "response_length_per_sample_max": _largest(index.response_lengths),
        "total_length_per_sample": Metric.mean_of(index.total_lengths),
        "trained_tokens": Metric.mean_of(trained),
        "untrained_rollouts": Metric.mean(int((trained == 0).sum()), count),
    }
    if "truncated" in given:
        cut = given["truncated"] != 0
        report["truncated"] = Metric.mean_of(per_rollout(cut) > 0)
        report["truncated_per_sample"] = Metric.mean_of(cut)
    if "turns" in given:
        calls = per_rollout(given["turns"])
        report |= {"turns": Metric.mean_of(calls), "turns_max": _largest(calls)}
    first = np.unique(rollout, return_index=True)[1]
    rewards = [samples[row].reward for row in first]
    report |= _reward_metrics(np.array([np.nan if r is None else r for r in rewards], np.float64))
    group_of_rollout = index.group_indices[first]
    right = given["solved"][first] != 0 if "solved" in given else _at_least_one(rewards)
    report |= pass_rates(right, group_of_rollout, pass_at)
    report["constant_groups"] = _constant_groups(rewards, group_of_rollout)
    return report


def _columns(num_samples: int, **extras: ArrayLike | None) -> dict[str, NDArray[Any]]:
    """Those that are given, as arrays [S]."""
    given = {name: np.asarray(x) for name, x in extras.items() if x is not None}
    for name, column in given.items():
        if column.shape != (num_samples,):
            raise ValueError(
                f"{name} has shape {column.shape}; give one value for each of the {num_samples} "
                "samples"
            )
    return given


def _reward_metrics(rewards: NDArray[np.float64]) -> dict[str, Metric]:
    scored = rewards[~np.isnan(rewards)]
    return {
        "reward": Metric.mean_of(scored),
        "reward_std": Metric.std_of(scored),
        "reward_min": Metric("min", (float(scored.min(initial=np.inf)),)),
        "reward_max": _largest(scored),
        "unscored_rollouts": Metric.mean(int(rewards.size - scored.size), rewards.size),
    }


def _largest(values: ArrayLike) -> Metric:
    return Metric("max", (float(np.asarray(values, np.float64).max(initial=-np.inf)),))


def _at_least_one(rewards: Sequence[float | None]) -> NDArray[np.bool_]:
    return np.array([r is not None and r >= 1 for r in rewards], dtype=np.bool_)


def _constant_groups(rewards: Sequence[float | None], groups: NDArray[np.int64]) -> Metric:
    """Share of groups of several rollouts whose rewards do not differ."""
    scores = np.array([np.nan if r is None else r for r in rewards], np.float64)
    members = [scores[groups == g] for g in np.unique(groups)]
    several = [m for m in members if m.size > 1]
    return Metric.mean(sum(float(np.std(m)) <= NEAR_CONSTANT for m in several), len(several))


def pass_rates(
    solved: NDArray[np.bool_], groups: NDArray[np.int64], pass_at: Sequence[int]
) -> dict[str, Metric]:
    """pass@k: the chance that at least one of k rollouts of a prompt solves it, over prompts.

    Of a group with n rollouts, c of them solved: 1 − C(n−c, k)/C(n, k), unbiased for any n ≥ k
    (arXiv:2107.03374 eq. 1). Groups with n < k say nothing about it and are left out; how many took
    part is `pass@k_groups`.

    Args:
        solved: [G] whether each rollout solved its task.
        groups: [G] prompt group of each rollout.
        pass_at: The k.
    """
    _, dense = np.unique(groups, return_inverse=True)
    sizes = np.bincount(dense)
    failed = sizes - np.bincount(dense, solved.astype(np.float64)).astype(np.int64)
    report = {}
    for k in pass_at:
        n, f = sizes[sizes >= k], failed[sizes >= k]
        # C(n−c, k)/C(n, k) as a product of k factors, each in [0, 1].
        missed = np.ones(n.size)
        for j in range(k):
            missed = missed * np.maximum(f - j, 0) / (n - j)
        report[f"pass@{k}"] = Metric.mean(float((1.0 - missed).sum()), float(n.size))
        report[f"pass@{k}_groups"] = Metric.count(int(n.size))
    return report


def token_metrics(
    columns: Mapping[str, Sequence[ArrayLike]], samples: Sequence[Sample]
) -> dict[str, Metric]:
    """Means per rollout of per-token values, reduced as the `rollout` loss is.

    Args:
        columns: Name → one [R_i] array per sample.
        samples: Give masks and rollouts.

    Returns:
        Name → Σ_i (1/d_i)·Σ_t m·x over the number of rollouts, d the rollout's mask sum. A rollout
        without trained token counts with 0, as in the loss.
    """
    index = SampleIndex.from_samples(samples)
    rollout = index.rollout_indices
    denoms = np.bincount(rollout, index.mask_sums, minlength=index.num_rollouts)[rollout]
    keep = np.concatenate([*(s.loss_mask != 0 for s in samples), np.zeros(0, bool)])
    weights = np.repeat(1.0 / np.maximum(denoms, 1), index.response_lengths)
    report = {}
    for name, column in columns.items():
        x = np.concatenate([*(np.asarray(v, np.float64) for v in column), np.zeros(0)])
        if x.shape != keep.shape:
            raise ValueError(f"{name} has {x.size} values for {keep.size} response tokens")
        total = float((np.where(keep, x, 0.0) * weights).sum())
        report[name] = Metric.mean(total, float(index.num_rollouts))
    return report

"""The report of a batch of rollouts, by hand, and pass@k against every choice of k rollouts."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.report import merge, rollout_report, token_metrics
from megatron_dynbatch.report.catalogue import ROLLOUT
from megatron_dynbatch.report.rollout_report import pass_rates
from megatron_dynbatch.rollouts import Sample


def sample(length: int, rollout: int, group: int, reward: float | None, trained: int = 1) -> Sample:
    mask = [trained] * length
    return Sample(np.arange(length + 2), loss_mask=mask, rollout_id=rollout, group_id=group,
                  reward=reward)  # fmt: skip


# Rollout 0 has three samples; group 7 holds rollouts 0 to 2, group 8 holds 3 and 4, group 9 one.
BATCH = [
    sample(4, 0, 7, 1.0), sample(2, 0, 7, 1.0), sample(6, 0, 7, 1.0),
    sample(3, 1, 7, 0.0), sample(5, 2, 7, 0.0),
    sample(1, 3, 8, 1.0), sample(1, 4, 8, 1.0),
    sample(10, 5, 9, None, trained=0),
]  # fmt: skip
TRUNCATED = [0, 1, 0, 0, 0, 0, 0, 1]
TURNS = [1, 2, 3, 1, 1, 1, 1, 4]


def values(**options: object) -> dict[str, float]:
    return {n: m.value() for n, m in rollout_report(BATCH, **options).items()}


def test_rollouts_and_samples_are_counted_apart() -> None:
    found = values(truncated=TRUNCATED, turns=TURNS, pass_at=(1, 2))
    expected = {
        "num_rollouts": 6, "num_samples": 8, "num_groups": 3, "samples_per_rollout": 8 / 6,
        "response_length": 32 / 6, "response_length_max": 12,
        "response_length_per_sample": 4, "response_length_per_sample_max": 10,
        "total_length_per_sample": 6, "trained_tokens": 22 / 6, "untrained_rollouts": 1 / 6,
        "truncated": 2 / 6, "truncated_per_sample": 2 / 8, "turns": 14 / 6, "turns_max": 6,
        "reward": 3 / 5, "reward_std": np.std([1, 0, 0, 1, 1]), "reward_min": 0, "reward_max": 1,
        "unscored_rollouts": 1 / 6, "constant_groups": 1 / 2,
        # Groups: 1 of 3, 2 of 2, 0 of 1 (left out of pass@2).
        "pass@1": (1 / 3 + 1 + 0) / 3, "pass@1_groups": 3,
        "pass@2": (2 / 3 + 1) / 2, "pass@2_groups": 2,
    }  # fmt: skip
    assert found == pytest.approx(expected)
    known = {name.replace("k", k) if "@" in name else name for name in ROLLOUT for k in "12"}
    assert found.keys() <= known
    kinds = {name: m.kind for name, m in rollout_report(BATCH, pass_at=(1,)).items()}
    assert all(kinds[n] == ROLLOUT[n.replace("@1", "@k")].kind for n in kinds)


def test_batches_of_several_processes_add_up() -> None:
    whole = values(solved=[1, 1, 1, 0, 0, 1, 0, 0])
    parts = [
        rollout_report(BATCH[:5], solved=[1, 1, 1, 0, 0]),
        rollout_report(BATCH[5:], solved=[1, 0, 0]),
    ]
    found = {n: m.value() for n, m in merge(parts, "process").items()}
    assert found == pytest.approx(whole, nan_ok=True)
    assert found["pass@1"] == pytest.approx((1 / 3 + 1 / 2 + 0) / 3)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4),
       st.integers(1, 4))  # fmt: skip
def test_pass_at_k_is_the_share_of_choices_that_hold_a_solution(
    groups: list[list[bool]], k: int
) -> None:
    solved = np.array([s for group in groups for s in group])
    ids = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
    found = pass_rates(solved, ids, (k,))
    shares = [
        np.mean([any(chosen) for chosen in combinations(group, k)])
        for group in groups
        if len(group) >= k
    ]
    assert found[f"pass@{k}_groups"].value() == len(shares)
    expected = np.mean(shares) if shares else np.nan
    assert found[f"pass@{k}"].value() == pytest.approx(expected, nan_ok=True)


def test_token_values_are_reduced_as_the_loss_is() -> None:
    # Rollout 0: 12 tokens, x = 1, 2, 3 by sample; an untrained rollout counts with 0.
    x = [np.full(s.response_length, float(i + 1)) for i, s in enumerate(BATCH)]
    x[7][:] = np.nan
    found = token_metrics({"x": x}, BATCH)["x"].value()
    assert found == pytest.approx(((4 * 1 + 2 * 2 + 6 * 3) / 12 + 4 + 5 + 6 + 7 + 0) / 6)


def test_columns_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"turns has shape \(2,\); give one value for each of"):
        rollout_report(BATCH, turns=[1, 2])
    with pytest.raises(ValueError, match="x has 3 values for 32 response tokens"):
        token_metrics({"x": [np.zeros(3)]}, BATCH)

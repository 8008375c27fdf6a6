"""Advantages by hand, against NumPy, and independent of how samples and ranks are cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.rollouts.advantages import (
    Moments,
    gae,
    group_advantages,
    informative_groups,
    leave_one_out,
    token_rewards,
    whiten,
)

# Group 7: rollouts 10 (three samples), 11, 12 with rewards 0, 1, 2; group 8: one rollout;
# group 9: two equal rewards.
REWARDS = [0, 0, 0, 1, 2, 5, 0.3, 0.1 + 0.2]
ROLLOUTS = [10, 10, 10, 11, 12, 13, 14, 15]
GROUPS = [7, 7, 7, 7, 7, 8, 9, 9]


def test_a_rollout_counts_once_however_many_samples_it_emitted() -> None:
    found = group_advantages(REWARDS, ROLLOUTS, GROUPS)
    std = np.sqrt(2 / 3)
    assert found.values.tolist() == pytest.approx([-1 / std] * 3 + [0, 1 / std, 0, 0, 0])
    assert (found.num_groups, found.num_single, found.num_constant) == (3, 1, 1)
    assert not found.values[5:].any()  # exactly 0, although 0.3 and 0.1 + 0.2 differ
    assert informative_groups(found).tolist() == [0, 1, 2, 3, 4]


def test_without_scale_only_the_mean_is_taken_away() -> None:
    found = group_advantages(REWARDS, ROLLOUTS, GROUPS, scale="none")
    assert found.values.tolist() == [-1, -1, -1, 0, 1, 0, 0, 0]


def test_leave_one_out() -> None:
    found = leave_one_out(REWARDS, ROLLOUTS, GROUPS)
    assert found.values.tolist() == pytest.approx([-1.5] * 3 + [0, 1.5, 0, 0, 0])


groups_of_rewards = st.lists(
    st.lists(st.tuples(st.integers(-5, 5), st.integers(1, 3)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@settings(deadline=None)
@given(groups_of_rewards, st.randoms(use_true_random=False))
def test_fan_out_and_order_change_nothing(groups: list, draw) -> None:
    rows, expected = [], {}
    for g, members in enumerate(groups):
        rewards = np.array([r for r, _ in members], dtype=float)
        std = rewards.std()
        for k, (reward, fan_out) in enumerate(members):
            rollout = 100 * g + k
            others = np.delete(rewards, k)
            expected[rollout] = (
                (reward - rewards.mean()) / std if std > 0 else 0.0,
                reward - others.mean() if others.size and std > 0 else 0.0,
            )
            rows += [(reward, rollout, g)] * fan_out
    draw.shuffle(rows)
    columns = list(zip(*rows, strict=True))
    found = group_advantages(*columns).values, leave_one_out(*columns).values
    for row, (_, rollout, _) in enumerate(rows):
        assert (found[0][row], found[1][row]) == pytest.approx(expected[rollout], abs=1e-12)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([1.0], [0, 1], [0, 0]), "1 rewards, 2 rollout ids and 2 group ids"),
        (([1.0, 2.0], [3, 3], [0, 0]), r"row 1 has another reward \(2.0\) than .* rollout 3"),
        (([1.0, 1.0], [3, 3], [0, 1]), "row 1 has another group"),
        (([1.0, np.nan], [3, 4], [0, 0]), r"row 1 \(rollout 4\) has reward nan"),
    ],
)
def test_bad_rewards_name_the_row(columns: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(*columns)


def test_whitening_over_context_parallel_ranks_is_one_map() -> None:
    # Advantages 0, 0 and 2, 2; zigzag gives each of two ranks one token of each sample.
    parts = [Moments.of([0.0, 2.0]), Moments.of([0.0, 2.0])]
    moments = Moments.combine(parts)
    assert (moments.count, moments.mean, moments.std) == (4, 1.0, 1.0)
    for _ in range(2):
        (local,) = whiten([[0.0, 2.0]], [[1, 1]], moments=moments)
        assert local.tolist() == pytest.approx([-1, 1], abs=1e-7)
    # Ranks whose own moments differ agree all the same.
    assert Moments.combine([Moments.of([0.0, 0.0]), Moments.of([2.0, 2.0])]) == moments


def test_whitening_leaves_masked_tokens_out() -> None:
    first, second = whiten([[0.0, np.nan, 2.0], [np.inf, 4.0]], [[1, 0, 1], [0, 1]])
    std = np.std([0, 2, 4])
    assert first.tolist() == pytest.approx([-2 / std, 0, 0])
    assert second.tolist() == pytest.approx([0, 2 / std])
    (shifted,) = whiten([[0.0, 2.0]], [[1, 1]], shift_mean=False)
    assert shifted.tolist() == pytest.approx([0, 2], abs=1e-7)
    assert whiten([[3.0, 3.0]], [[1, 1]])[0].tolist() == [0, 0]
    assert whiten([], []) == []
    with pytest.raises(ValueError, match="sample 1 has 2 values and a mask of 1"):
        whiten([[1.0], [1.0, 2.0]], [[1], [1]])


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), max_size=6),
    st.floats(-1e6, 1e6),
)
def test_moments_do_not_depend_on_the_cut(parts: list[list[float]], offset: float) -> None:
    parts = [[x + offset for x in part] for part in parts]
    whole = np.array([x for part in parts for x in part])
    found = Moments.combine(Moments.of(part) for part in parts)
    assert found.count == whole.size
    if whole.size:
        assert found.mean == pytest.approx(whole.mean(), rel=1e-12, abs=1e-9)
        assert found.std == pytest.approx(whole.std(), rel=1e-6, abs=1e-7)


def test_reward_on_the_last_trained_token_and_kl_on_each() -> None:
    mask, kl = [1, 0, 1, 0], [0.5, np.nan, 1.0, np.inf]
    assert token_rewards(3.0, mask, kl, kl_coef=0.1).tolist() == pytest.approx([-0.05, 0, 2.9, 0])
    assert token_rewards(3.0, mask, kl).tolist() == [0, 0, 3, 0]
    assert token_rewards(3.0, [0, 0]).tolist() == [0, 0]


def test_gae_against_its_sum() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 9))
    mask = np.array([1, 1, 0, 0, 1, 1, 0, 1, 0])
    advantages, returns = gae(rewards, values, mask, discount=0.9, smoothing=0.8, bootstrap=0.5)
    trained = np.flatnonzero(mask)
    r, v = rewards[trained], np.append(values[trained], 0.5)
    delta = r + 0.9 * v[1:] - v[:-1]
    for k, place in enumerate(trained):
        total = sum((0.9 * 0.8) ** j * delta[k + j] for j in range(len(trained) - k))
        assert advantages[place] == pytest.approx(total)
        assert returns[place] == pytest.approx(total + values[place])
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()
    # λ = 1: discounted rewards minus the value.
    monte_carlo, _ = gae([0.0, 0.0, 1.0], [0.3, 0.2, 0.1], [1, 1, 1], smoothing=1.0)
    assert monte_carlo.tolist() == pytest.approx([0.7, 0.8, 0.9])
    assert gae([], [], [])[0].size == 0
    with pytest.raises(ValueError, match="2 rewards, 1 values and a mask of 2"):
        gae([1.0, 1.0], [1.0], [1, 1])

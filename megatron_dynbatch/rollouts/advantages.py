"""Advantages on the rollout side: ragged groups, fan-out, and moments that ranks can add up.

Rewards belong to rollouts. Functions of rewards take one row per *sample*, with the rollout of each
row, and count a rollout once however many samples it emitted; siblings must agree on their reward.
Ids are any integers: equal means together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float64 = NDArray[np.float64]
Scale = Literal["std", "none"]

NEAR_CONSTANT = 1e-6
"""Rewards of a group whose standard deviation is at most this carry no signal."""


@dataclass(frozen=True, eq=False)
class Advantages:
    """Advantages of S samples, and which prompt groups gave none.

    Attributes:
        values: float64 [S], equal for the siblings of a rollout.
        informative: bool [S], whether the sample's group has any signal.
        num_groups: Prompt groups.
        num_single: Groups of one rollout, which has nothing to be compared with.
        num_constant: Groups of several rollouts whose rewards are all (nearly) the same.
    """

    values: Float64
    informative: NDArray[np.bool_]
    num_groups: int
    num_single: int
    num_constant: int


def group_advantages(
    rewards: ArrayLike, rollouts: ArrayLike, groups: ArrayLike, *, scale: Scale = "std"
) -> Advantages:
    """GRPO: (R − mean of the group) / standard deviation of the group (arXiv:2402.03300).

    Mean and population standard deviation over the group's rollouts. A group of one rollout, or
    one whose standard deviation is at most `NEAR_CONSTANT`, gives exactly 0 and is counted.

    Args:
        rewards: [S] reward of each sample's rollout.
        rollouts: [S] rollout of each sample.
        groups: [S] prompt group of each sample.
        scale: "none" leaves out the division (Dr. GRPO, arXiv:2503.20783).

    Raises:
        ValueError: Different lengths; siblings that disagree on reward or group; a reward that is
            not finite.
    """
    table = _RolloutTable(rewards, rollouts, groups)
    mean, std = table.mean(), table.std()
    has_signal = std > NEAR_CONSTANT
    centred = table.rewards - mean[table.group_of_rollout]
    if scale == "std":
        centred = centred / np.where(has_signal, std, 1.0)[table.group_of_rollout]
    elif scale != "none":
        raise ValueError(f"scale is 'std' or 'none', got {scale!r}")
    return table.spread(np.where(has_signal[table.group_of_rollout], centred, 0.0), has_signal)


def leave_one_out(rewards: ArrayLike, rollouts: ArrayLike, groups: ArrayLike) -> Advantages:
    """RLOO: R minus the mean reward of the group's other rollouts (arXiv:2402.14740).

    A group of one rollout gives 0. Arguments and errors as for `group_advantages`.
    """
    table = _RolloutTable(rewards, rollouts, groups)
    others = np.maximum(table.sizes - 1, 1)
    # R_i − (Σ − R_i)/(n − 1) = n/(n − 1)·(R_i − mean)
    factor = np.where(table.sizes > 1, table.sizes / others, 0.0)
    centred = table.rewards - table.mean()[table.group_of_rollout]
    has_signal = table.std() > NEAR_CONSTANT
    values = np.where(
        has_signal[table.group_of_rollout], factor[table.group_of_rollout] * centred, 0.0
    )
    return table.spread(values, has_signal)


def informative_groups(advantages: Advantages) -> NDArray[np.int64]:
    """Rows of the samples whose group has signal, ascending: DAPO's dynamic sampling.

    Plan and train these rows alone: G, d and B then count what is trained (arXiv:2503.14476,
    section 3.2). To keep the left-out rollouts in B instead, train all rows: their advantage is 0.
    """
    return np.flatnonzero(advantages.informative)


class _RolloutTable:
    """One row per rollout, from one row per sample."""

    def __init__(self, rewards: ArrayLike, rollouts: ArrayLike, groups: ArrayLike) -> None:
        reward = np.asarray(rewards, dtype=np.float64)
        rollout, group = np.asarray(rollouts), np.asarray(groups)
        if not reward.shape == rollout.shape == group.shape or reward.ndim != 1:
            raise ValueError(
                f"{reward.size} rewards, {rollout.size} rollout ids and {group.size} group ids "
                "were given; each sample needs one of each"
            )
        if not np.isfinite(reward).all():
            row = int(np.flatnonzero(~np.isfinite(reward))[0])
            raise ValueError(
                f"row {row} (rollout {rollout[row]}) has reward {reward[row]}; score it, or leave "
                "its rollout out"
            )
        _, first, self.rollout_of_sample = np.unique(
            rollout, return_index=True, return_inverse=True
        )
        for name, column in (("reward", reward), ("group", group)):
            differs = np.flatnonzero(column != column[first][self.rollout_of_sample])
            if differs.size:
                row = int(differs[0])
                raise ValueError(
                    f"row {row} has another {name} ({column[row]}) than the first row of its "
                    f"rollout {rollout[row]}; siblings share it"
                )
        self.rewards = reward[first]
        _, self.group_of_rollout = np.unique(group[first], return_inverse=True)
        self.sizes = np.bincount(self.group_of_rollout)

    def mean(self) -> Float64:
        """Mean reward of each group."""
        return np.bincount(self.group_of_rollout, self.rewards) / self.sizes

    def std(self) -> Float64:
        """Population standard deviation of each group's rewards."""
        centred = self.rewards - self.mean()[self.group_of_rollout]
        return np.sqrt(np.bincount(self.group_of_rollout, centred**2) / self.sizes)

    def spread(self, values: Float64, has_signal: NDArray[np.bool_]) -> Advantages:
        """Values of rollouts, given to each of their samples."""
        single = self.sizes == 1
        return Advantages(
            values=values[self.rollout_of_sample],
            informative=has_signal[self.group_of_rollout][self.rollout_of_sample],
            num_groups=len(self.sizes),
            num_single=int(single.sum()),
            num_constant=int((~has_signal & ~single).sum()),
        )


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of some numbers; what whitening needs.

    Ranks that hold different tokens each make their own and combine those of all ranks in rank
    order: every rank then has the same numbers to the last bit. Merging is that of Chan, Golub and
    LeVeque (1979), which loses no digits to cancellation.
    """

    count: float = 0.0
    mean: float = 0.0
    deviations: float = 0.0

    @classmethod
    def of(cls, values: ArrayLike, mask: ArrayLike | None = None) -> Moments:
        """Moments of the values where the mask is not 0; anything may stand elsewhere."""
        array = np.asarray(values, dtype=np.float64)
        kept = array if mask is None else array[np.asarray(mask) != 0]
        if kept.size == 0:
            return cls()
        mean = float(kept.mean())
        return cls(float(kept.size), mean, float(((kept - mean) ** 2).sum()))

    @classmethod
    def combine(cls, parts: Iterable[Moments]) -> Moments:
        """Moments of the union of disjoint parts."""
        total = cls()
        for part in parts:
            count = total.count + part.count
            if part.count == 0:
                continue
            step = part.mean - total.mean
            total = cls(
                count,
                total.mean + step * part.count / count,
                total.deviations + part.deviations + step * step * total.count * part.count / count,
            )
        return total

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for no values."""
        return float(np.sqrt(self.deviations / self.count)) if self.count else 0.0


def whiten(
    values: Sequence[ArrayLike],
    masks: Sequence[ArrayLike],
    *,
    moments: Moments | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> list[Float64]:
    """One affine map of all trained tokens: (x − mean) / (std + ε), population std.

    Args:
        values: Per-token values of each sample, [R_i].
        masks: Loss masks, [R_i]; masked tokens do not count and give 0.
        moments: Those of the whole batch, combined over all ranks (context-parallel ranks hold
            disjoint tokens, so over DP×CP); default: of these values alone.
        shift_mean: Without it only the scale changes; the mean is put back.
        epsilon: ε > 0 keeps constant values at 0.

    Raises:
        ValueError: Lists or entries of different lengths, naming the sample.
    """
    if len(values) != len(masks):
        raise ValueError(f"{len(values)} samples but {len(masks)} masks were given")
    arrays = [np.asarray(x, dtype=np.float64) for x in values]
    kept = [np.asarray(m) != 0 for m in masks]
    for i, (x, m) in enumerate(zip(arrays, kept, strict=True)):
        if x.shape != m.shape:
            raise ValueError(f"sample {i} has {x.size} values and a mask of {m.size} entries")
    if moments is None:
        moments = Moments.of(
            np.concatenate([*arrays, np.zeros(0)]), np.concatenate([*kept, np.zeros(0, bool)])
        )
    scale, back = 1.0 / (moments.std + epsilon), 0.0 if shift_mean else moments.mean
    return [
        np.where(m, (np.where(m, x, 0.0) - moments.mean) * scale + back, 0.0)
        for x, m in zip(arrays, kept, strict=True)
    ]


def token_rewards(
    reward: float,
    loss_mask: ArrayLike,
    kl: ArrayLike | None = None,
    *,
    kl_coef: float = 0.0,
) -> Float64:
    """Rewards of one sample's response tokens [R]: −β·kl_t, and R on the last trained one.

    The KL in the reward instead of in the loss: arXiv:1909.08593 eq. 2.

    Args:
        reward: R of the rollout; give it to its last sample, and 0 to the others.
        loss_mask: [R].
        kl: [R] KL to the reference of each token (see `formulas` for estimators).
        kl_coef: β; with 0 the KL is not looked at.
    """
    trained = np.asarray(loss_mask) != 0
    rewards = np.zeros(trained.shape)
    if kl_coef and kl is not None:
        rewards = np.where(trained, -kl_coef * np.where(trained, kl, 0.0), 0.0)
    places = np.flatnonzero(trained)
    if places.size:
        rewards[places[-1]] += reward
    return rewards


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    loss_mask: ArrayLike,
    *,
    discount: float = 1.0,
    smoothing: float = 0.95,
    bootstrap: float = 0.0,
) -> tuple[Float64, Float64]:
    """Generalised advantage estimation over the trained tokens of one sample.

        δ_t = r_t + γ·V_{t+1} − V_t,   A_t = δ_t + γλ·A_{t+1}      arXiv:1506.02438 eq. 16

    t runs over trained tokens only: what the environment wrote in between is no action.

    Args:
        rewards: r, [R].
        values: V, [R], at the prediction of each token.
        loss_mask: [R].
        discount: γ.
        smoothing: λ.
        bootstrap: V after the last trained token; 0 where the rollout ended, the value of what
            follows where it was truncated.

    Returns:
        Advantages and returns A + V, float64 [R] each; 0 at masked tokens.

    Raises:
        ValueError: Entries of different lengths.
    """
    reward, value = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    trained = np.asarray(loss_mask) != 0
    if not reward.shape == value.shape == trained.shape or reward.ndim != 1:
        raise ValueError(
            f"{reward.size} rewards, {value.size} values and a mask of {trained.size} entries "
            "were given; each response token needs one of each"
        )
    r, v = reward[trained], value[trained]
    delta = r + discount * np.append(v[1:], bootstrap)[: len(v)] - v
    advantage, kept = 0.0, np.zeros_like(delta)
    for t in range(len(delta) - 1, -1, -1):
        advantage = delta[t] + discount * smoothing * advantage
        kept[t] = advantage
    advantages, returns = np.zeros_like(reward), np.zeros_like(reward)
    advantages[trained], returns[trained] = kept, kept + v
    return advantages, returns

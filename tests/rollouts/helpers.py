"""Samples that several tests share, and their comparison."""

from collections.abc import Sequence

import numpy as np

from megatron_dynbatch.rollouts import OPTIONAL_FIELDS, PER_TOKEN_FIELDS, Sample
from megatron_dynbatch.rollouts.sample import EXTRA_KINDS
from tests import golden

FIELDS = ("tokens", "loss_mask", "rollout_id", "group_id", "policy_version")


def golden_samples() -> list[Sample]:
    """Samples A, B, C, D of the golden fixture: prompts of 3, 5, 2, 1 tokens, three rollouts."""
    return [
        Sample(
            range(10 * i, 10 * i + golden.TOTALS[i]),
            loss_mask=golden.MASKS[i],
            rollout_id=golden.ROLLOUTS[i],
            values=golden.VALUES[i],
        )
        for i in range(4)
    ]


def random_samples(num_samples: int, seed: int, max_length: int = 40) -> list[Sample]:
    """Samples with every field, trained or fully masked, NaN where masked."""
    rng = np.random.default_rng(seed)
    samples = []
    for row in range(num_samples):
        total = int(rng.integers(1, max_length))
        mask = rng.integers(0, 2, int(rng.integers(0, total)))  # a prompt token at least
        fields = {
            name: np.where(mask == 1, rng.normal(size=len(mask)), np.nan)
            for name in PER_TOKEN_FIELDS
        }
        samples.append(
            Sample(
                rng.integers(0, 1000, total),
                loss_mask=mask,
                rollout_id=None if row % 5 == 4 else row // 2,
                group_id=None if row % 5 == 4 else row // 4,
                policy_version=row % 3,
                reward=float(rng.normal()),
                advantage=float(rng.normal()) if row % 2 else rng.normal(size=len(mask)),
                token_arrays={"experts": rng.integers(0, 8, (total, 2, 3)).astype(np.int16)},
                response_arrays={"scores": rng.normal(size=len(mask))},
                blobs={"image": rng.bytes(row)} if row % 2 else {},
                **fields,
            )
        )
    return samples


def assert_same_samples(found: Sequence[Sample], wanted: Sequence[Sample]) -> None:
    """Every field equal, bit for bit, with the same type."""
    assert len(found) == len(wanted)
    for row, (left, right) in enumerate(zip(found, wanted, strict=True)):
        for name in (*FIELDS, *OPTIONAL_FIELDS):
            one, other = getattr(left, name), getattr(right, name)
            assert type(one) is type(other), (row, name, one, other)
            np.testing.assert_array_equal(one, other, err_msg=f"row {row}, {name}", strict=True)
        for kind in EXTRA_KINDS:
            one, other = getattr(left, kind), getattr(right, kind)
            assert one.keys() == other.keys(), (row, kind)
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], strict=True)

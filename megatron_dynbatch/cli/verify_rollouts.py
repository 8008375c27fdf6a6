"""Small rollouts that tell wrong losses from right ones, for `verify`.

Rollouts of one to three samples of different lengths, masks with holes, unequal numbers of trained
tokens: nothing that is averaged in the wrong place comes out the same by accident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_dynbatch.rollouts import OPTIONAL_FIELDS, RolloutDirectory, Sample
from megatron_dynbatch.rollouts.kept import first_kept

LONGEST = 24
_VOCAB = 32


def made_up_batches(num_batches: int, num_rollouts: int, seed: int) -> list[list[Sample]]:
    """Batches of made-up rollouts, one optimizer step each, with every column a loss may read."""
    rng = np.random.default_rng(seed)
    return [
        [
            _made_up(rng, rollout)
            for rollout in range(num_rollouts + batch)
            for _ in range(1 + (rollout + batch) % 3)
        ]
        for batch in range(num_batches)
    ]


def _made_up(rng: np.random.Generator, rollout: int) -> Sample:
    length = int(rng.integers(4, LONGEST + 1))
    response = int(rng.integers(2, length))
    mask = (rng.random(response) < 0.75).astype(np.int64)
    mask[-1] = 1
    # Near what a model with random weights says, so that ratios lie on both sides of clip bounds.
    level = -math.log(_VOCAB * 4)

    def column(center: float, spread: float) -> np.ndarray:
        return rng.normal(center, spread, response)

    return Sample(
        rng.integers(0, _VOCAB, length),
        loss_mask=mask,
        rollout_id=rollout,
        group_id=rollout // 2,
        reward=float(rng.random()),
        advantage=float(rng.normal()),
        log_probs=column(level, 0.3),
        ref_log_probs=column(level, 0.3),
        rollout_log_probs=column(level, 0.3),
        values=column(0.0, 1.0),
        returns=column(0.0, 1.0),
    )


def with_masked_siblings(batch: Sequence[Sample]) -> list[Sample]:
    """The same batch, and one more sample without a trained token for every second rollout."""
    seen: set[int | None] = set()
    extended = []
    for sample in batch:
        extended.append(sample)
        if sample.rollout_id not in seen and len(seen) % 2 == 0:
            extended.append(_changed(sample, loss_mask=np.zeros_like(sample.loss_mask)))
        seen.add(sample.rollout_id)
    return extended


def twice(batch: Sequence[Sample]) -> list[Sample]:
    """Every rollout of the batch, and a copy of it as another rollout of another group."""
    rollouts = 1 + max(s.rollout_id or 0 for s in batch)
    groups = 1 + max(s.group_id or 0 for s in batch)
    copies = [
        _changed(
            s,
            rollout_id=None if s.rollout_id is None else s.rollout_id + rollouts,
            group_id=None if s.group_id is None else s.group_id + groups,
        )
        for s in batch
    ]
    return [*batch, *copies]


def _changed(sample: Sample, **changes: object) -> Sample:
    fields = {name: getattr(sample, name) for name in OPTIONAL_FIELDS}
    fields |= {name: getattr(sample, name) for name in ("loss_mask", "rollout_id", "group_id")}
    return Sample(sample.tokens, **{**fields, **changes})


def read_batches(path: Path, num_batches: int) -> list[list[Sample]]:
    """The first batches of a rollout directory that are still there.

    Raises:
        ValueError: The directory holds no batch.
    """
    directory = RolloutDirectory(path)
    batches: list[list[Sample]] = []
    batch_id = first_kept(directory)
    while len(batches) < num_batches and directory.state(batch_id) == "present":
        batches.append(list(directory.read(batch_id, range(len(directory.index(batch_id))))))
        batch_id += 1
    if not batches:
        raise ValueError(f"{path} holds no rollout batch; leave --rollouts out to make some up")
    return batches


def write_batches(path: Path, batches: Sequence[Sequence[Sample]]) -> None:
    """Write the batches and the END marker."""
    directory = RolloutDirectory(path)
    for batch in batches:
        directory.write(list(batch))
    directory.finish()

"""Hashes of what a rank has of a batch, so that ranks and runs can compare it in few bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_dynbatch.plan import Plan
from megatron_dynbatch.rollouts import PER_TOKEN_FIELDS, Sample
from megatron_dynbatch.steps.announcement import Origins

_OPTIONAL = ("advantage", *PER_TOKEN_FIELDS)


def steps_digest(plan: Plan, origins: Origins) -> str:
    """Hash of which samples each step has, whatever ranks and micro-batches they are on.

    A sample is its batch and row here; what is in them, the stamps of the cursor tell.
    """
    steps = [[origins[row] for row in step.samples.tolist()] for step in plan.steps]
    return hashlib.sha256(json.dumps(steps).encode()).hexdigest()


def sample_digests(
    plan: Plan, samples: Mapping[int, Sample], *, all_fields: bool
) -> dict[str, str]:
    """Hashes of the samples that one data-parallel rank trains: equal on all ranks of it.

    Args:
        plan: Of the batch.
        samples: Plan row → sample.
        all_fields: Whether this rank read the optional fields too.

    Returns:
        What was hashed → hash: tokens; token weights (mask and denominator, w = m / d); and
        advantages, log-probs and values where they were read.
    """
    rows = sorted(samples)
    digests = {
        "tokens": _digest(rows, lambda row: [samples[row].tokens]),
        "token weights": _digest(
            rows, lambda row: [samples[row].loss_mask, plan.sample_denoms[row]]
        ),
    }
    if all_fields:
        digests["advantages, log-probs and values"] = _digest(
            rows, lambda row: [getattr(samples[row], name) for name in _OPTIONAL]
        )
    return digests


def _digest(rows: list[int], parts_of: Callable[[int], list[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(f"row {row}".encode())
        for part in parts_of(row):
            if part is None:
                digest.update(b"absent")
                continue
            array = np.ascontiguousarray(part)
            # Lengths and types belong to it: otherwise a token could move to the next part.
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.data)
    return digest.hexdigest()

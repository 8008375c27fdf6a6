"""`FeedConfig`: what one rank's step feed reads, how long it waits, and what it keeps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from megatron_dynbatch.steps.announce import Staleness
from megatron_dynbatch.steps.source_wait import GRACE_SECONDS

MOST_EMPTY_BATCHES = 3
"""Batches in a row that train nothing which are an error."""


@dataclass(frozen=True)
class FeedConfig:
    """Settings of a `StepFeed`.

    Attributes:
        dp_rank: Data-parallel rank of this process (without context parallelism).
        cp_rank: Context-parallel rank of this process.
        batch_timeout: Seconds that rank 0 waits for a batch or the end.
        device: Where micro-batches go.
        fields: Optional fields of samples that this rank reads; None: all that there are.
        lengths_only: Samples are not read at all, as on a pipeline stage that neither embeds tokens
            nor computes the loss: they have their lengths, and zeros as tokens and mask.
        staleness: Which rollouts are too old, and what happens to them.
        wait_for_path: Whether the source may come as late as a batch; else it must be there within
            a minute (or `batch_timeout`, if that is less).
        max_empty_batches: Batches in a row that train nothing which are an error.
        keep_batches: Batches to keep before the one that a completed checkpoint stands at; None:
            nothing is deleted.
        job_facts: Field → value of whatever else must be equal on all ranks; compared once.
        rollouts_moved: A restored run may find its batches in another source than before.
    """

    dp_rank: int = 0
    cp_rank: int = 0
    batch_timeout: float = 1800.0
    device: torch.device | str = "cpu"
    fields: Collection[str] | None = None
    lengths_only: bool = False
    staleness: Staleness = Staleness()
    wait_for_path: bool = False
    max_empty_batches: int = MOST_EMPTY_BATCHES
    keep_batches: int | None = None
    job_facts: Mapping[str, str] = field(default_factory=dict)
    rollouts_moved: bool = False

    @property
    def path_timeout(self) -> float:
        """Seconds that rank 0 waits for the source to be there."""
        return self.batch_timeout if self.wait_for_path else min(GRACE_SECONDS, self.batch_timeout)

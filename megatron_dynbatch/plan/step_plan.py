"""`StepPlan`: what runs where in one step; and the one place where it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.denominators import loss_denominator
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.rollouts.index import SampleIndex

MicroBatches = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step.

    Attributes:
        micro_batches: [dp][M] tuples of sample rows; an empty tuple is a dummy micro-batch.
        step_global_batch_size: G, rollouts in the step.
        loss_denominator: B, what the loss of the step is divided by.
        num_trained_tokens: N, the sum of all masks; a step with N = 0 is passed over by the
            trainer, its G rollouts are counted all the same.
    """

    micro_batches: MicroBatches
    step_global_batch_size: int
    loss_denominator: int
    num_trained_tokens: int

    @property
    def num_microbatches(self) -> int:
        """M, micro-batches per DP rank, dummies included."""
        return len(self.micro_batches[0])

    @property
    def num_samples(self) -> int:
        """S, samples in the step."""
        return sum(len(rows) for rank in self.micro_batches for rows in rank)

    @property
    def num_dummies(self) -> int:
        """Dummy micro-batches over all DP ranks."""
        return sum(not rows for rank in self.micro_batches for rows in rank)

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        """Sample rows of the step [S], ascending."""
        rows = [row for rank in self.micro_batches for rows in rank for row in rows]
        return np.sort(np.array(rows, dtype=np.int64))


def make_step(
    micro_batches: Sequence[Sequence[Sequence[int]]],
    num_rollouts: int,
    index: SampleIndex,
    options: PlanOptions,
) -> StepPlan:
    """The step that these micro-batches are, with what it is divided by.

    Args:
        micro_batches: [dp][M] sample rows; an empty one is a dummy.
        num_rollouts: G, rollouts in the step.
        index: The batch, whose rows they are.
        options: Gives the reduction.
    """
    ranks = tuple(tuple(map(tuple, rank)) for rank in micro_batches)
    rows = np.fromiter(chain.from_iterable(chain.from_iterable(ranks)), dtype=np.int64)
    return StepPlan(
        micro_batches=ranks,
        step_global_batch_size=num_rollouts,
        loss_denominator=loss_denominator(index, rows, options),
        num_trained_tokens=int(index.mask_sums[rows].sum()),
    )

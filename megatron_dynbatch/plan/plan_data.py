"""The plain data of a plan, below everything that is done with one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.step_plan import StepPlan
from megatron_dynbatch.rollouts.index import SampleIndex


@dataclass(frozen=True, eq=False)
class PlanData:
    """The steps of one batch: which sample is in which micro-batch on which DP rank.

    Sample rows index the batch as it is handed to training: the samples carried over from the
    batch before, followed by the batch's own rows.

    Attributes:
        layout: The parallel layout that the plan is for.
        options: The options that made it.
        index: Lengths, mask sums and ids of all samples [S].
        steps: The steps, in order.
        sample_denoms: Denominator d of each sample [S]; int64, float64 under `constant`; 0 for a
            sample in no step.
        carried: Rows kept for the next batch, ascending.
        dropped: Rows trained nowhere (leftover or oversize policy `drop`), ascending.
        oversize: Rows longer than a micro-batch may be, ascending.
    """

    layout: ParallelLayout
    options: PlanOptions
    index: SampleIndex
    steps: tuple[StepPlan, ...]
    sample_denoms: NDArray[np.int64] | NDArray[np.float64]
    carried: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    oversize: tuple[int, ...] = ()

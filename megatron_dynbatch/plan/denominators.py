"""Denominators of the loss, in integers, fixed for a step before anything is packed.

    L = (1 / B) · Σ_i (1 / d[i]) · Σ_t m[i,t] · x[i,t]

`sample_denominators` gives d, `loss_denominator` gives B.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.rollouts.index import SampleIndex


def sample_denominators(
    index: SampleIndex, rows: NDArray[np.int64], options: PlanOptions
) -> NDArray[np.int64] | NDArray[np.float64]:
    """Denominator d of every sample [S]; 0 for a sample that is not among `rows`.

    Args:
        index: The batch.
        rows: Samples that are trained on; rollouts (and groups) among them are whole.
        options: Gives the reduction. d is int64, and float64 under `constant`.
    """
    reduction = options.loss_reduction
    if reduction == "constant":
        constants = np.zeros(len(index.total_lengths), dtype=np.float64)
        constants[rows] = options.loss_constant
        return constants
    denoms = np.zeros(len(index.total_lengths), dtype=np.int64)
    if reduction == "token":
        denoms[rows] = 1
    elif reduction == "sample":
        denoms[rows] = index.mask_sums[rows]
    else:
        units = _units(index, reduction)
        denoms[rows] = _unit_sums(units, rows, index.mask_sums)[units[rows]]
    return denoms


def loss_denominator(index: SampleIndex, rows: NDArray[np.int64], options: PlanOptions) -> int:
    """B of the step that holds the samples `rows`: what its loss is finally divided by.

    Under `empty_rollouts="skip"` units without a trained token are left out, so a step without
    any trained token has B = 0 (it is passed over).
    """
    reduction = options.loss_reduction
    if reduction == "token":
        return int(index.mask_sums[rows].sum())
    if reduction == "sample":
        counts = index.mask_sums[rows]
    else:
        units = _units(index, reduction)
        sums = _unit_sums(units, rows, index.mask_sums)
        is_present = np.zeros(sums.size, dtype=bool)
        is_present[units[rows]] = True
        counts = sums[is_present]
    if options.empty_rollouts == "skip":
        return int(np.count_nonzero(counts))
    return int(counts.size)


def _units(index: SampleIndex, reduction: str) -> NDArray[np.int64]:
    """Dense unit of each sample [S]: its prompt group under `group`, else its rollout."""
    return index.group_indices if reduction == "group" else index.rollout_indices


def _unit_sums(
    units: NDArray[np.int64], rows: NDArray[np.int64], values: NDArray[np.int64]
) -> NDArray[np.int64]:
    sums = np.zeros(int(units.max()) + 1 if units.size else 0, dtype=np.int64)
    np.add.at(sums, units[rows], values[rows])
    return sums

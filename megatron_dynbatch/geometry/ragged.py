"""Index arithmetic on ragged arrays, without a loop over their entries."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int64 = NDArray[np.int64]


def ragged_arange(starts: ArrayLike, lengths: ArrayLike) -> Int64:
    """Concatenates ranges: starts[0] … starts[0]+lengths[0]−1, then those of 1, and so on.

    Args:
        starts: [n] first value of each range.
        lengths: [n] number of values of each range, ≥ 0.

    Returns:
        int64 [Σ lengths].
    """
    starts = np.asarray(starts, dtype=np.int64)
    lengths = np.asarray(lengths, dtype=np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)


def starts_of(lengths: ArrayLike) -> Int64:
    """First offset of each of several consecutive ranges of these lengths, int64 [n]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return np.cumsum(lengths) - lengths

"""`compute_dynamic_global_batch_size`: the older rule of one step per batch."""

from __future__ import annotations

from megatron_dynbatch.errors import PlanError


def compute_dynamic_global_batch_size(num_samples: int, dp_size: int) -> int:
    """⌊num_samples / dp_size⌋ · dp_size, at least dp_size.

    The older rule of one step per batch, in which every rank gets equally many samples. Plans
    of this package need no such trimming.
    """
    if num_samples < 0 or dp_size < 1:
        raise PlanError(
            f"num_samples must be >= 0 and dp_size >= 1, got {num_samples} and {dp_size}"
        )
    return max(num_samples // dp_size, 1) * dp_size

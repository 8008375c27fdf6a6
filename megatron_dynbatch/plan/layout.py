"""To be removed."""

from megatron_dynbatch.geometry import (
    ParallelLayout,
    padded_length,
    padded_micro_batch,
    most_response_rows as response_rows,
)  # noqa

"""To be removed."""

from megatron_dynbatch.geometry import ParallelLayout, padded_length, padded_micro_batch
from megatron_dynbatch.geometry import most_response_rows as response_rows

__all__ = ["ParallelLayout", "padded_length", "padded_micro_batch", "response_rows"]

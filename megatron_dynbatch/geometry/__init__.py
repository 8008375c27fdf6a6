"""Where every token lies: ranks, padding, the context-parallel zigzag, and the layout of a pack.

Nothing above this package computes the position of a token: it asks the pack.
"""

from megatron_dynbatch.geometry.pack_layout import PackLayout
from megatron_dynbatch.geometry.padding import padded_length, padded_micro_batch
from megatron_dynbatch.geometry.parallel_layout import ParallelLayout
from megatron_dynbatch.geometry.ragged import ragged_arange, starts_of
from megatron_dynbatch.geometry.response_pieces import (
    ResponsePieces,
    most_response_rows,
    response_pieces,
)
from megatron_dynbatch.geometry.spans import Spans
from megatron_dynbatch.geometry.zigzag import zigzag_indices

__all__ = [
    "PackLayout",
    "ParallelLayout",
    "ResponsePieces",
    "Spans",
    "most_response_rows",
    "padded_length",
    "padded_micro_batch",
    "ragged_arange",
    "response_pieces",
    "starts_of",
    "zigzag_indices",
]

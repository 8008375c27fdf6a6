"""A micro-batch as tensors: THD packing, padding, and the context-parallel zigzag layout."""

import megatron_dynbatch._torch  # noqa: F401
from megatron_dynbatch.geometry import zigzag_indices
from megatron_dynbatch.layout.micro_batch import (
    MicroBatch,
    build_micro_batch,
    pack_micro_batch,
    slice_packed,
)
from megatron_dynbatch.layout.packed_sequence import PackedSequence, pack_samples
from megatron_dynbatch.layout.stock import stock_batch

__all__ = [
    "MicroBatch",
    "PackedSequence",
    "build_micro_batch",
    "pack_micro_batch",
    "pack_samples",
    "slice_packed",
    "stock_batch",
    "zigzag_indices",
]

"""The one padding rule: of samples, of micro-batches, and of the tail of a micro-batch."""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry.parallel_layout import ParallelLayout
from megatron_dynbatch.geometry.ragged import Int64

MAX_TAIL_SEQUENCE = 128
"""Tokens of a padding sequence: short ones keep attention cost and FLOP counts honest."""


@overload
def padded_length(lengths: int, layout: ParallelLayout) -> int: ...
@overload
def padded_length(lengths: NDArray[np.int64], layout: ParallelLayout) -> NDArray[np.int64]: ...
def padded_length(
    lengths: int | NDArray[np.int64], layout: ParallelLayout
) -> int | NDArray[np.int64]:
    """Tokens that each sample occupies once laid out: a multiple of 2·cp (of 1 if cp = 1)."""
    multiple = layout.sample_multiple
    return -(-lengths // multiple) * multiple


def padded_micro_batch(total: int, layout: ParallelLayout) -> int:
    """Tokens of a variable-width micro-batch whose padded samples hold `total` tokens.

    A multiple of lcm(2·cp·tp under sequence parallelism, 16·cp for FP8, 32·cp for MXFP8).
    """
    multiple = layout.micro_batch_multiple
    return -(-total // multiple) * multiple


def tail_lengths(used: int, width: int | None, layout: ParallelLayout) -> Int64:
    """Lengths of the padding sequences that follow `used` tokens of samples, int64 [n].

    Args:
        used: Tokens of the samples as laid out.
        width: Tokens of the micro-batch; None: as few as the layout allows.
        layout: Decides the multiples.

    Raises:
        ValueError: A width that is too small or no multiple of what the layout needs.
    """
    multiple = layout.micro_batch_multiple
    if width is None:
        width = padded_micro_batch(max(used, 1), layout)
    elif width % multiple:
        raise ValueError(
            f"width {width} is not a multiple of {multiple} tokens, as this layout needs: choose "
            "--seq-length (max-tokens-per-gpu · cp) accordingly"
        )
    if used > width:
        raise ValueError(
            f"the micro-batch holds {used} tokens as laid out, more than its width {width}; plan "
            "with max_tokens_per_gpu = width / cp"
        )
    unit = layout.sample_multiple
    longest = max(MAX_TAIL_SEQUENCE // unit, 1) * unit
    full, rest = divmod(width - used, longest)
    return np.array([longest] * full + [rest] * (rest > 0), dtype=np.int64)

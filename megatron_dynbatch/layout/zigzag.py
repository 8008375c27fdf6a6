"""Which positions of a packed sequence a context-parallel rank owns.

Megatron's layout for causal attention: each sequence is cut in 2·C equal chunks, and rank r owns
chunks r and 2·C−1−r, so that every rank has the same attention work. A rank's tokens are its first
chunk and then its second chunk of sequence 0, of sequence 1, and so on.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_dynbatch.reduce.ragged import ragged_arange


def zigzag_indices(cu_seqlens_padded: ArrayLike, cp_size: int, cp_rank: int) -> NDArray[np.int64]:
    """Positions of the packed sequence that a context-parallel rank owns, in its local order.

    Args:
        cu_seqlens_padded: [n+1] cumulative lengths as laid out, in tokens of the full sequence.
        cp_size: context-parallel size C.
        cp_rank: rank in 0 … C−1.

    Returns:
        int64 [total / C]: `full[zigzag_indices(…)]` is the rank's local tensor. With C = 1 this is
        0 … total−1.

    Raises:
        ValueError: A length that 2·C does not divide, or a rank outside 0 … C−1.
    """
    cu = np.asarray(cu_seqlens_padded, dtype=np.int64)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"context-parallel rank {cp_rank} is outside 0 … {cp_size - 1}")
    if cp_size == 1:
        return np.arange(cu[0], cu[-1], dtype=np.int64)
    lengths = np.diff(cu)
    bad = np.flatnonzero(lengths % (2 * cp_size))
    if bad.size:
        raise ValueError(
            f"sequence {bad[0]} of the pack is {lengths[bad[0]]} tokens long, which 2·cp = "
            f"{2 * cp_size} does not divide; pad every sequence with plan.padded_length"
        )
    chunk = lengths // (2 * cp_size)
    first = cu[:-1] + cp_rank * chunk
    second = cu[:-1] + (2 * cp_size - 1 - cp_rank) * chunk
    return ragged_arange(np.stack([first, second], 1).ravel(), np.repeat(chunk, 2))

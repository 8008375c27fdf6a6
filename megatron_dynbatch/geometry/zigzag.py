"""Which positions of a packed sequence a context-parallel rank owns.

Megatron's layout for causal attention: each sequence is cut in 2·C equal chunks, and rank r owns
chunks r and 2·C−1−r, so that every rank has the same attention work. A rank's tokens are its first
chunk and then its second chunk of sequence 0, of sequence 1, and so on. `owned_chunks` is the only
place where this is written down.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from megatron_dynbatch.geometry.ragged import Int64, ragged_arange


def num_chunks(cp_size: int, zigzag: bool = True) -> int:
    """Equal chunks that a sequence is cut in: 2·C (C if they are contiguous; 1 if C = 1)."""
    return 1 if cp_size == 1 else cp_size * (1 + zigzag)


def owned_chunks(
    lengths: Int64, cp_size: int, cp_rank: int, zigzag: bool = True
) -> tuple[Int64, Int64]:
    """Start and length in its sequence of each chunk that a rank owns.

    Args:
        lengths: [n] laid-out lengths in tokens, divisible by `num_chunks`.
        cp_size: Context-parallel size C.
        cp_rank: Rank in 0 … C−1.
        zigzag: Chunks r and 2·C−1−r belong to rank r (Megatron); else chunk r of C.

    Returns:
        starts int64 [n, P] and lengths int64 [n] (all of a sequence's chunks are equally long);
        P is 2 under the zigzag, else 1.
    """
    chunk = lengths // num_chunks(cp_size, zigzag)
    owned = [cp_rank, 2 * cp_size - 1 - cp_rank] if zigzag and cp_size > 1 else [cp_rank]
    return chunk[:, None] * np.array(owned), chunk


def zigzag_indices(cu_seqlens_padded: ArrayLike, cp_size: int, cp_rank: int) -> Int64:
    """Positions of the packed sequence that a context-parallel rank owns, in its local order.

    Args:
        cu_seqlens_padded: [n+1] cumulative lengths as laid out, in tokens of the full sequence.
        cp_size: Context-parallel size C.
        cp_rank: Rank in 0 … C−1.

    Returns:
        int64 [total / C]: `full[zigzag_indices(…)]` is the rank's local tensor. With C = 1 this is
        0 … total−1.

    Raises:
        ValueError: A length that 2·C does not divide, or a rank outside 0 … C−1.
    """
    cu = np.asarray(cu_seqlens_padded, dtype=np.int64)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"context-parallel rank {cp_rank} is outside 0 … {cp_size - 1}")
    lengths = np.diff(cu)
    bad = np.flatnonzero(lengths % num_chunks(cp_size))
    if bad.size:
        raise ValueError(
            f"sequence {bad[0]} of the pack is {lengths[bad[0]]} tokens long, which 2·cp = "
            f"{2 * cp_size} does not divide; pad every sequence with plan.padded_length"
        )
    starts, chunk = owned_chunks(lengths, cp_size, cp_rank)
    return ragged_arange((cu[:-1, None] + starts).ravel(), np.repeat(chunk, starts.shape[1]))

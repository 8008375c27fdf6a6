"""A packed sequence in the form that Megatron's stock SFT `get_batch` expects."""

import numpy as np
import torch
from torch import Tensor

from megatron_dynbatch.layout.packed_sequence import PackedSequence


def stock_batch(packed: PackedSequence) -> dict[str, Tensor]:
    """The batch dict of `--sft`, of the full sequence: the stock script slices it over CP itself.

    Returns:
        tokens, labels, position_ids int64 [1, S]; loss_mask float32 [1, S] of 0 and 1;
        cu_seqlens and cu_seqlens_padded int32 [1, n+1], both as laid out, because the stock script
        hands on only one of them without CP and the other one with it; max_seqlen int32 [1]. All
        on the CPU, contiguous.
    """
    cu_seqlens = packed.pack.cu_seqlens_padded[None]
    arrays = {
        "tokens": packed.tokens[None],
        "labels": packed.labels[None],
        "loss_mask": packed.loss_mask[None],
        "position_ids": packed.pack.position_ids[None],
        "cu_seqlens": cu_seqlens,
        "cu_seqlens_padded": cu_seqlens.copy(),
        "max_seqlen": np.array([packed.pack.max_seqlen], dtype=np.int32),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}

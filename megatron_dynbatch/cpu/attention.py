"""Causal attention over packed sequences, under context parallelism, from plain torch.

Tensors are THD: [tokens of this rank, heads, head size]. With context parallelism the tokens are
in the zigzag layout of `megatron_dynbatch.geometry`. Keys and values of all ranks are
gathered and brought into packed order; each sequence then attends on its own, so the cost is that
of the sequences and not of the square of the pack. The tests hold this against one call of
torch's attention per sequence, in float64, forward and backward.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_dynbatch.geometry import zigzag_indices


class _GatherTokens(torch.autograd.Function):
    """Concatenate the tokens of all ranks; backward sums the gradients and takes the own slice."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        local = local.contiguous()
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # gloo has no reduce-scatter for every dtype, so all-reduce and cut.
        (grad,) = grads
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


@lru_cache(maxsize=64)
def _packed_order(cu_seqlens: tuple[int, ...], cp_size: int) -> Tensor:
    """Index that brings rank-major gathered tokens into packed order."""
    owners = [zigzag_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
    return torch.from_numpy(np.argsort(np.concatenate(owners)))


def _chunk_mask(length: int, cp_size: int, cp_rank: int, window: int | None) -> Tensor:
    """[length / C, length] True where a local query row of one sequence may see a key."""
    rows = torch.from_numpy(zigzag_indices((0, length), cp_size, cp_rank))[:, None]
    keys = torch.arange(length)[None, :]
    return (keys <= rows) if window is None else (keys <= rows) & (keys >= rows - window)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    *,
    causal: bool,
    scale: float,
    sink: Tensor | None,
    dropout: float,
) -> Tensor:
    """[b, heads, s, d_v]; `sink` [heads] is one more score in each softmax, of a value of zero."""
    if sink is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=causal and visible is None,
            dropout_p=dropout, scale=scale,
        )  # fmt: skip
    scores = q @ k.transpose(-1, -2) * scale
    if visible is None and causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    column = sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return F.dropout(weights, dropout) @ v


def packed_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    cp_group: dist.ProcessGroup | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Let every token see the tokens of its own sequence up to itself.

    Args:
        query: [T/C, heads, d] in this rank's zigzag layout (T/C = T without context parallelism).
        key: [T/C, groups, d]; `heads` is a multiple of `groups`.
        value: [T/C, groups, d_v].
        cu_seqlens: [n+1] cumulative lengths as laid out, over the full pack of T tokens.
        scale: factor on the scores.
        cp_group: context-parallel group, or None for one rank.
        dropout: probability of dropping an attention weight.
        window: how many tokens before itself a token sees; None: all.
        sink: [heads] a further score in each softmax, whose value is zero; None: there is none.

    Returns:
        [T/C, heads, d_v].

    Raises:
        ValueError: `cu_seqlens` does not cover the pack exactly.
    """
    cp_size = cp_group.size() if cp_group is not None else 1
    cp_rank = cp_group.rank() if cp_group is not None else 0
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != query.shape[0] * cp_size:
        raise ValueError(
            f"cu_seqlens runs from {bounds[0]} to {bounds[-1]} but the micro-batch has "
            f"{query.shape[0] * cp_size} tokens; make the tail padding a sequence of its own"
        )
    if cp_size > 1:
        assert cp_group is not None
        gathered = _GatherTokens.apply(torch.cat([key, value], dim=-1), cp_group)
        packed = gathered[_packed_order(bounds, cp_size)]
        key, value = packed.split([key.shape[-1], value.shape[-1]], dim=-1)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    outputs = []
    for start, end in pairwise(bounds):
        if start == end:
            continue
        plain = cp_size == 1 and window is None
        outputs.append(
            _attend(
                q[:, :, start // cp_size : end // cp_size],
                k[:, :, start:end],
                v[:, :, start:end],
                None if plain else _chunk_mask(end - start, cp_size, cp_rank, window),
                causal=True,
                scale=scale,
                sink=sink,
                dropout=dropout,
            )
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1).contiguous()


def batch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Tensor | None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of an ordinary batch without packing.

    Args:
        query: [s, b, heads, d].
        key: [s_kv, b, groups, d].
        value: [s_kv, b, groups, d_v].
        hidden: [b or 1, 1, s, s_kv] True where a query must not see a key; None: nothing hidden.
        causal: whether a token sees only itself and earlier ones.
        scale: factor on the scores.
        dropout: probability of dropping an attention weight.
        window: with `causal`, how many tokens before itself a token sees; None: all.
        sink: [heads] a further score in each softmax, whose value is zero; None: there is none.

    Returns:
        [s, b, heads · d_v].
    """
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    visible = None if hidden is None else ~hidden
    if causal and (visible is not None or window is not None):
        past = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        past = past if window is None else past.triu(-window)
        visible = past if visible is None else visible & past
    out = _attend(q, k, v, visible, causal=causal, scale=scale, sink=sink, dropout=dropout)
    return out.permute(2, 0, 1, 3).flatten(2).contiguous()

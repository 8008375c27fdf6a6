"""Packed attention equals torch's attention on each sequence alone, under context parallelism."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_dynbatch.cpu.attention import batch_attention, packed_causal_attention
from megatron_dynbatch.layout.zigzag import zigzag_indices
from tests.pool import run_ranks

BAR = 1e-10
LENGTHS = [8, 24, 0, 16, 8, 40]
HEADS, GROUPS, SIZE = 4, 2, 6


def inputs() -> tuple[list[int], list[Tensor], Tensor]:
    """Cumulative lengths, [query, key, value] and the gradient of the output, all of the pack."""
    random = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)

    def draw(heads: int) -> Tensor:
        return torch.randn(total, heads, SIZE, generator=random, dtype=torch.float64)

    return np.cumsum([0, *LENGTHS]).tolist(), [draw(HEADS), draw(GROUPS), draw(GROUPS)], draw(HEADS)


def one_by_one(bounds: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition: every sequence alone, query head h reads group h // (heads per group)."""
    rows = []
    for start, end in pairwise(bounds):
        for t in range(start, end):
            for h in range(HEADS):
                g = h * GROUPS // HEADS
                scores = (k[start : t + 1, g] @ q[t, h]) / SIZE**0.5
                rows.append(F.softmax(scores, dim=0) @ v[start : t + 1, g])
    return torch.stack(rows).view(-1, HEADS, SIZE)


def attend_and_differentiate(
    leaves: list[Tensor], bounds: list[int], grad: Tensor, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    q, k, v = (leaf.clone().requires_grad_() for leaf in leaves)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    out = packed_causal_attention(q, k, v, cu_seqlens, scale=SIZE**-0.5, cp_group=group)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def zigzag_job() -> tuple[np.ndarray, list[Tensor]]:
    world = dist.group.WORLD
    assert world is not None
    bounds, leaves, grad = inputs()
    mine = zigzag_indices(bounds, world.size(), world.rank())
    local = attend_and_differentiate([x[mine] for x in leaves], bounds, grad[mine], world)
    return mine, local


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    bounds, leaves, grad = inputs()
    q, k, v = (leaf.requires_grad_() for leaf in leaves)
    out = one_by_one(bounds, q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def test_packed_equals_one_by_one(expected: list[Tensor]) -> None:
    bounds, leaves, grad = inputs()
    for got, want in zip(attend_and_differentiate(leaves, bounds, grad), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=BAR)


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_equals_one_by_one(cp: int, expected: list[Tensor]) -> None:
    for mine, local in run_ranks(cp, zigzag_job):
        for got, want in zip(local, expected, strict=True):
            torch.testing.assert_close(got, want[mine], rtol=0, atol=BAR)


def test_unpacked_batch_equals_one_sequence_per_row() -> None:
    random = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(7, 3, n, SIZE, generator=random).double() for n in (HEADS, GROUPS, GROUPS)
    )
    out = batch_attention(q, k, v, None, causal=True, scale=SIZE**-0.5)
    for row in range(3):
        want = one_by_one([0, 7], q[:, row], k[:, row], v[:, row]).flatten(1)
        torch.testing.assert_close(out[:, row], want, rtol=0, atol=BAR)


def test_tail_outside_every_sequence_is_an_error() -> None:
    q = torch.zeros(8, 1, 2)
    with pytest.raises(ValueError, match="0 to 6 but the micro-batch has 8 tokens"):
        packed_causal_attention(q, q, q, torch.tensor([0, 6], dtype=torch.int32), scale=1.0)

"""Packed attention equals torch's attention on each sequence alone, under context parallelism."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.cpu.attention import batch_attention, packed_causal_attention
from megatron_dynbatch.geometry import zigzag_indices
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


def one_by_one(
    bounds: list[int], q: Tensor, k: Tensor, v: Tensor, window: int | None = None,
    sink: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition: every sequence alone, query head h reads group h // (heads per group).

    A token sees `window` tokens before itself; exp(sink) is added to the sum of each softmax.
    """
    rows = []
    for start, end in pairwise(bounds):
        for t in range(start, end):
            first = start if window is None else max(start, t - window)
            for h in range(HEADS):
                g = h * GROUPS // HEADS
                weights = torch.exp((k[first : t + 1, g] @ q[t, h]) / SIZE**0.5)
                total = weights.sum() + (0 if sink is None else torch.exp(sink[h]))
                rows.append(weights / total @ v[first : t + 1, g])
    return torch.stack(rows).view(-1, HEADS, SIZE)


def attend_and_differentiate(
    leaves: list[Tensor], bounds: list[int], grad: Tensor, group: dist.ProcessGroup | None = None,
    window: int | None = None, sink: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    given = [leaf.clone().requires_grad_() for leaf in (*leaves, *([] if sink is None else [sink]))]
    q, k, v, *own = given
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    out = packed_causal_attention(
        q, k, v, cu_seqlens, scale=SIZE**-0.5, cp_group=group, window=window,
        sink=own[0] if own else None,
    )  # fmt: skip
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


SINK = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)


def zigzag_job(
    window: int | None = None, sink: Tensor | None = None
) -> tuple[np.ndarray, list[Tensor]]:
    world = dist.group.WORLD
    assert world is not None
    bounds, leaves, grad = inputs()
    mine = zigzag_indices(bounds, world.size(), world.rank())
    own = [x[mine] for x in leaves]
    return mine, attend_and_differentiate(own, bounds, grad[mine], world, window, sink)


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


@pytest.mark.parametrize("window, sink", [(5, None), (None, SINK), (5, SINK)])
def test_windows_and_sinks_equal_one_by_one(window: int | None, sink: Tensor | None) -> None:
    bounds, leaves, grad = inputs()
    given = [x.requires_grad_() for x in (*leaves, *([] if sink is None else [sink.clone()]))]
    out = one_by_one(bounds, *given[:3], window, given[3] if sink is not None else None)
    want = [out.detach(), *torch.autograd.grad(out, given, grad)]
    plain = [x.detach() for x in leaves]
    got = attend_and_differentiate(plain, bounds, grad, None, window, sink)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=BAR)
    parts = run_ranks(2, zigzag_job, window, sink)
    for mine, local in parts:
        for a, b in zip(local[:4], want[:4], strict=True):
            torch.testing.assert_close(a, b[mine], rtol=0, atol=BAR)
    if sink is not None:  # each rank has the gradient of its own query rows
        both = parts[0][1][4] + parts[1][1][4]
        torch.testing.assert_close(both, want[4], rtol=0, atol=BAR)


def test_windows_and_sinks_of_an_unpacked_batch() -> None:
    random = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(7, 3, n, SIZE, generator=random).double() for n in (HEADS, GROUPS, GROUPS)
    )
    out = batch_attention(q, k, v, None, causal=True, scale=SIZE**-0.5, window=2, sink=SINK)
    for row in range(3):
        want = one_by_one([0, 7], q[:, row], k[:, row], v[:, row], 2, SINK).flatten(1)
        torch.testing.assert_close(out[:, row], want, rtol=0, atol=BAR)


def test_tail_outside_every_sequence_is_an_error() -> None:
    q = torch.zeros(8, 1, 2)
    with pytest.raises(ValueError, match="0 to 6 but the micro-batch has 8 tokens"):
        packed_causal_attention(q, q, q, torch.tensor([0, 6], dtype=torch.int32), scale=1.0)

"""Whitening over context-parallel ranks: cases.md, and ranks that hold unequal parts."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dynbatch.losses import whiten_over_ranks
from tests.pool import run_ranks

WHOLE = [0.0, 0.0, 2.0, 2.0]
UNEVEN = [[1.0, 5.0, 7.0], []]


def job() -> list[list[float]]:
    rank = dist.get_rank()
    # Zigzag with two ranks: chunks 0 and 3, chunks 1 and 2.
    zigzag = torch.tensor(WHOLE)[[[0, 3], [1, 2]][rank]]
    uneven = torch.tensor(UNEVEN[rank])
    masked = torch.tensor([[0.0, float("nan")], [2.0, 9.0]][rank])
    return [
        whiten_over_ranks(zigzag, torch.ones(2)).tolist(),
        whiten_over_ranks(uneven, torch.ones_like(uneven)).tolist(),
        whiten_over_ranks(masked, torch.tensor([1.0, 0.0])).tolist(),
    ]


def test_two_ranks_use_one_map() -> None:
    first, second = run_ranks(2, job)
    assert first[0] == pytest.approx([-1, 1], abs=1e-7) and second[0] == first[0]
    expected = (np.array(UNEVEN[0]) - np.mean(UNEVEN[0])) / np.std(UNEVEN[0])
    assert first[1] == pytest.approx(expected.tolist(), rel=1e-7) and second[1] == []
    assert first[2] == pytest.approx([-1, 0], abs=1e-7)
    assert second[2] == pytest.approx([1, 0], abs=1e-7)


def test_alone_and_of_another_shape() -> None:
    found = whiten_over_ranks(torch.tensor(WHOLE), torch.ones(4))
    assert found.tolist() == pytest.approx([-1, -1, 1, 1], abs=1e-7)
    with pytest.raises(ValueError, match=r"shape \[2\], their mask \[3\]"):
        whiten_over_ranks(torch.ones(2), torch.ones(3))

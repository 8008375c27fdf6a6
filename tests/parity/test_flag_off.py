"""An installed plugin that is not switched on changes nothing, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.parity.job import Cell, run_cell
from tests.parity.layouts import Layout
from tests.parity.test_layouts import name_of


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, vpp=2)], ids=name_of)
def test_losses_and_weights_are_bit_identical_without_the_flag(layout: Layout) -> None:
    flags: dict[str, object] = {
        **layout.flags(),
        "max-tokens-per-gpu": None,
        "sft": True,
        "no-create-attention-mask-in-dataloader": True,
        "seq-length": 64,
        "micro-batch-size": 1,
        "global-batch-size": 4,
        "train-samples": 12,
        "eval-iters": 1,
        "eval-interval": 2,
    }
    without, installed = (run_cell(Cell(layout.ranks, flags, plugin=p)) for p in (False, True))
    for one, other in zip(without, installed, strict=True):
        assert one.rows == other.rows and len(one.rows) == 3
        for before, after in zip(one.parameters, other.parameters, strict=True):
            assert all(torch.equal(before[n].values, after[n].values) for n in before)

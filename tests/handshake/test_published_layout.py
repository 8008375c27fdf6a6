"""What the trainer published is what the rollout side reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dynbatch.handshake import publish_layout, read_layout
from megatron_dynbatch.handshake.published_layout import LAYOUT_NOTE
from megatron_dynbatch.plan import ParallelLayout, PlanError, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory

LAYOUT = ParallelLayout(dp=2, cp=2)
OPTIONS = PlanOptions(max_tokens_per_gpu=64, rollouts_per_step=5, loss_reduction="token")


def test_layout_and_options_come_back(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path)
    assert read_layout(directory) is None
    publish_layout(directory, ParallelLayout(), OPTIONS)
    publish_layout(directory, LAYOUT, OPTIONS)
    assert read_layout(RolloutDirectory(tmp_path)) == (LAYOUT, OPTIONS)
    directory.publish(LAYOUT_NOTE, '{"layout": {"dp": 2, "ring": 3}, "options": {}}')
    with pytest.raises(PlanError, match="published layout cannot be read"):
        read_layout(directory)

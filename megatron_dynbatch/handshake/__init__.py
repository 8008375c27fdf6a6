"""Planning where the rollouts are: the trainer says for what, the rollout side plans and writes."""

from megatron_dynbatch.handshake.planned_batch import (
    checked_plan,
    plan_text,
    rows_by_rank,
    write_planned,
)
from megatron_dynbatch.handshake.published_layout import publish_layout, read_layout

__all__ = [
    "checked_plan",
    "plan_text",
    "publish_layout",
    "read_layout",
    "rows_by_rank",
    "write_planned",
]

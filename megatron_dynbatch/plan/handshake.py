"""Where `megatron_dynbatch.handshake` was first; what is imported from here comes from there."""

from megatron_dynbatch._lazy import names_from

_NAMES = (
    "checked_plan",
    "plan_text",
    "publish_layout",
    "read_layout",
    "rows_by_rank",
    "write_planned",
)

__getattr__ = names_from(dict.fromkeys(_NAMES, "handshake"), __name__)

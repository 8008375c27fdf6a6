"""Megatron-LM plugin: every training step has its own global batch size.

Names are imported when first used, so that ``megatron_dynbatch.plan`` and
``megatron_dynbatch.rollouts`` need neither torch nor Megatron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_dynbatch._lazy import names_from
from megatron_dynbatch._version import __version__

if TYPE_CHECKING:
    from megatron_dynbatch.hooks import (
        current,
        get_batch,
        install,
        on_batch_needed,
        on_batch_opened,
        uninstall,
    )
    from megatron_dynbatch.layout import MicroBatch
    from megatron_dynbatch.rollouts import RolloutDirectory, Sample

_HOME = {
    "MicroBatch": "layout",
    "RolloutDirectory": "rollouts",
    "Sample": "rollouts",
    "current": "hooks",
    "get_batch": "hooks",
    "install": "hooks",
    "on_batch_needed": "hooks",
    "on_batch_opened": "hooks",
    "uninstall": "hooks",
}

__all__ = [
    "MicroBatch",
    "RolloutDirectory",
    "Sample",
    "__version__",
    "current",
    "get_batch",
    "install",
    "on_batch_needed",
    "on_batch_opened",
    "uninstall",
]


__getattr__ = names_from(_HOME, __name__)

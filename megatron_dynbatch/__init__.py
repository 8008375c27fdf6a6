"""Megatron-LM plugin: every training step has its own global batch size.

Names are imported when first used, so that ``megatron_dynbatch.plan`` and
``megatron_dynbatch.rollouts`` need neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)

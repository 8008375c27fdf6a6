"""The policy seam: the one place where a policy's weights reach a generator.

Called on every rank at the step boundary whenever the next rollout batch is not there yet: the
first time before step 1. It may generate rollouts itself, or hand the weights to whoever does.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from typing import Any

from megatron_dynbatch.steps import Cursor

OnBatchNeeded = Callable[[Cursor, list[Any]], None]

_registered: OnBatchNeeded | None = None


def on_batch_needed(function: OnBatchNeeded | None) -> OnBatchNeeded | None:
    """Register ``function(cursor, model_chunks)``; also a decorator. None removes it.

    It is called on every rank, with parameters gathered, when the batch at ``cursor.batch_id`` is
    not there yet. It must not leave a rank behind in a collective; an error it raises is raised
    on all ranks.
    """
    global _registered
    _registered = function
    return function


def batch_needed(model: list[Any], args: argparse.Namespace) -> Callable[[Cursor], None] | None:
    """The registered function (or the one named by --on-batch-needed) bound to this model."""
    function = _registered or _named(args.on_batch_needed)
    if function is None:
        return None

    def call(cursor: Cursor) -> None:
        if args.use_distributed_optimizer and args.overlap_param_gather:
            for chunk in model:
                chunk.start_param_sync(force_sync=True)
        function(cursor, model)

    return call


def _named(path: str | None) -> OnBatchNeeded | None:
    if path is None:
        return None
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"--on-batch-needed {path!r}: expected package.module:function")
    return getattr(importlib.import_module(module), name)

"""The seams between training and a policy, both at the step boundary and on every rank.

`on_batch_needed` is where a policy's weights reach a generator: called whenever the next rollout
batch is not there yet, the first time before step 1. It may generate rollouts itself, or hand the
weights to whoever does. `on_batch_opened` is called before the first step of a batch and may
complete its samples, by a forward-only pass for example.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks.options import TrainingOptions
from megatron_dynbatch.rollouts import Sample
from megatron_dynbatch.steps import Cursor, LoadedBatch

OnBatchNeeded = Callable[[Cursor, list[Any]], None]
OnBatchOpened = Callable[[LoadedBatch, list[Any]], Mapping[int, Sample]]

_registered: OnBatchNeeded | None = None
_registered_opened: OnBatchOpened | None = None


def on_batch_needed(function: OnBatchNeeded | None) -> OnBatchNeeded | None:
    """Register ``function(cursor, model_chunks)``; also a decorator. None removes it.

    It is called on every rank, with parameters gathered, when the batch at ``cursor.batch_id`` is
    not there yet. It must not leave a rank behind in a collective; an error it raises is raised
    on all ranks.
    """
    global _registered
    _registered = function
    return function


def on_batch_opened(function: OnBatchOpened | None) -> OnBatchOpened | None:
    """Register ``function(batch, model_chunks)``; also a decorator. None removes it.

    It is called on every rank before the first step of a batch (after a resume inside a batch,
    again), with parameters gathered, and returns this rank's samples, plan row → sample.
    """
    global _registered_opened
    _registered_opened = function
    return function


def batch_needed(model: list[Any], options: TrainingOptions) -> Callable[[Cursor], None] | None:
    """The registered function (or the one named by --on-batch-needed) bound to this model."""
    function = _registered or _named("--on-batch-needed", options.on_batch_needed)
    return None if function is None else _bound(function, model, options)


def batch_opened(
    model: list[Any], options: TrainingOptions
) -> Callable[[LoadedBatch], Mapping[int, Sample]] | None:
    """The registered function (or the one named by --on-batch-opened) bound to this model."""
    function = _registered_opened or _named("--on-batch-opened", options.on_batch_opened)
    return None if function is None else _bound(function, model, options)


def _bound[T, R](
    function: Callable[[T, list[Any]], R], model: list[Any], options: TrainingOptions
) -> Callable[[T], R]:
    def call(argument: T) -> R:
        if options.gathers_late:
            for chunk in model:
                chunk.start_param_sync(force_sync=True)
        return function(argument, model)

    return call


def _named(flag: str, path: str | None) -> Any:
    if path is None:
        return None
    module, _, name = path.partition(":")
    if not name:
        raise OptionError(f"{flag} {path!r}: expected package.module:function")
    return getattr(importlib.import_module(module), name)

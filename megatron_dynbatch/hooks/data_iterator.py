"""Training data in Megatron's own batch contract, from the open step.

Seam: ``training.build_train_valid_test_data_iterators``. Each model chunk gets an iterator of its
own; an unmodified script reads stock batches from it, a script of ours calls `get_batch`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_dynbatch.hooks.first_batch import StockBatch
from megatron_dynbatch.hooks.session import current, session
from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.steps import Step


class StockBatchIterator(Iterator[dict[str, Any]]):
    """Micro-batches of the open step of this process's run, as Megatron's SFT batches.

    It starts anew with each step; reading past the step's last micro-batch is an error.
    """

    def __init__(self) -> None:
        self._step: Step | None = None
        self._next = 0

    def __next__(self) -> dict[str, Any]:
        run = session()
        if run is None or run.step is None:
            raise RuntimeError("the training data iterator was read outside a training step")
        if self._step is not run.step:
            self._step, self._next = run.step, 0
        batch = run.step.stock_batch(self._next)
        self._next += 1
        return StockBatch(batch)


def building_iterators(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``build_train_valid_test_data_iterators``: training data comes from the rollouts."""

    @functools.wraps(build)
    def build_with_rollouts(provider: Callable[..., Any]) -> tuple[Any, Any, Any]:
        run = session()
        if run is None:
            return build(provider)
        from megatron.core.rerun_state_machine import RerunDataIterator

        # The script's own evaluation data; its datasets are not built where none is wanted.
        valid = test = None
        if run.options.evaluates:
            _, valid, test = build(provider)
        run.live_args.tell_of_data(has_evaluation=run.options.evaluates)
        return RerunDataIterator(StockBatchIterator()), valid, test

    return build_with_rollouts


def get_batch(data_iterator: Any = None) -> MicroBatch:
    """The micro-batch of this forward step on this rank, for scripts of your own.

    Args:
        data_iterator: What Megatron hands to ``forward_step``; not read, the plan says what runs.

    Raises:
        RuntimeError: No training step runs under the plugin.
    """
    return current()

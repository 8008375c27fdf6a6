"""One optimizer step, from its opening to its log line, in the order in which Megatron asks.

Each function answers one expression of Megatron's (`registry.py` says which, and why): it gets the
expression's own value and the locals of the function that it stands in. Between `open_step` and
`advance_lr` the schedule runs the step's micro-batches (`loss.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dynbatch.hooks.balance import keep_balance
from megatron_dynbatch.hooks.policy import batch_needed, batch_opened
from megatron_dynbatch.hooks.report import report_step
from megatron_dynbatch.hooks.session import Session, session


def open_step(stock: bool, frame: Mapping[str, Any]) -> bool:
    """Open the next step, on every rank; False ends the training in the ordinary way.

    Args:
        stock: Whether Megatron would go on.
        frame: Locals of `train`.
    """
    run = session()
    if run is None:
        return stock
    run.step = None
    options = run.options
    if not (stock or options.counts_rollouts) or _all_consumed(run):
        return False
    feed = run.feed
    if feed.cursor.consumed_rollouts != run.live_args.consumed_rollouts:
        raise RuntimeError(
            f"not on a step boundary: Megatron counts {run.live_args.consumed_rollouts} consumed "
            f"rollouts, the cursor {feed.cursor.consumed_rollouts}"
        )
    run.at_step_boundary(frame["iteration"])
    if run.horizon is not None:
        run.horizon.at_boundary(frame["iteration"], feed.cursor)
    feed.on_batch_needed = batch_needed(frame["model"], options)
    feed.on_batch_opened = batch_opened(frame["model"], options)
    step = feed.open_step()
    # Empty steps that were passed over count as consumed.
    run.live_args.consumed_rollouts = feed.cursor.consumed_rollouts
    run.live_args.keep_cursor(feed.cursor.to_dict())
    if step is None or _all_consumed(run):
        if run.horizon is not None:
            run.horizon.at_end(feed.cursor)
        return False
    run.step = step
    return True


def _all_consumed(run: Session) -> bool:
    limit = run.options.train_samples
    return limit is not None and run.live_args.consumed_rollouts >= limit


def change_count(stock: bool, frame: Mapping[str, Any]) -> bool:
    """A new number of micro-batches is ordinary here: no check, no extra checkpoint."""
    return stock if session() is None else False


def advance_lr(stock: int, frame: Mapping[str, Any]) -> int:
    """LR and weight decay go on by G, the rollouts of the step.

    Args:
        stock: Micro-batches × micro-batch size × data-parallel size.
        frame: Locals of `train_step`, which asks only after an update that succeeded.
    """
    run = session()
    if run is None or run.step is None:
        return stock
    keep_balance(run)
    return run.step.step_global_batch_size


def finish_step(stock: int, frame: Mapping[str, Any]) -> int:
    """The step ran, or its update was skipped: its G rollouts are consumed.

    Args:
        stock: As of `advance_lr`.
        frame: Locals of `train`.
    """
    run = session()
    if run is None or run.step is None:
        return stock
    size = run.feed.finish_step()
    run.live_args.keep_cursor(run.feed.cursor.to_dict())
    return size


def log_step(stock: int, frame: Mapping[str, Any]) -> int:
    """Megatron's log line shows G; the step report is written beside it.

    Args:
        stock: As of `advance_lr`.
        frame: Locals of `training_log`, on every rank, after the losses were reduced.
    """
    run = session()
    if run is None or run.step is None:
        return stock
    report_step(run, run.step, frame)
    return run.step.step_global_batch_size

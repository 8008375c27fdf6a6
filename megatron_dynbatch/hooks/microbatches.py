"""The number of micro-batches of the open step, and the step boundary.

Seams: the object behind Megatron's module-level calculator functions; the loop condition of
`train`, where the next step opens on every rank; the check in `train` that the number of
micro-batches only grows; the count of consumed samples in `train`, where the step is finished.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from megatron_dynbatch.hooks.arguments import is_dynamic, settle_args
from megatron_dynbatch.hooks.policy import batch_needed, batch_opened
from megatron_dynbatch.hooks.session import Session, end_session, session, start_session


class StepCalculator:
    """Answers Megatron's calculator functions from the open step.

    Args:
        run: The session whose step is asked.
    """

    def __init__(self, run: Session) -> None:
        self._run = run

    def get(self) -> int:
        """M of the open step; 1 before the first one (only read for logging)."""
        return self._run.step.num_microbatches if self._run.step else 1

    def get_current_global_batch_size(self) -> int:
        """G of the open step; the configured size before the first one."""
        step = self._run.step
        return step.step_global_batch_size if step else self._run.options.global_batch_size

    def get_current_running_global_batch_size(self) -> int:
        """The same: no rollout is skipped for divisibility."""
        return self.get_current_global_batch_size()

    def get_micro_batch_size(self) -> int:
        """Sequences per micro-batch as Megatron sees them: one pack."""
        return self._run.options.micro_batch_size

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Nothing to do: steps open at the loop condition, not by a sample count."""


def building_calculator(
    build: Callable[..., Any], check: Callable[[], None]
) -> Callable[..., Any]:
    """Wrap ``_build_num_microbatches_calculator``: ours when the flag is on.

    Args:
        build: What is wrapped.
        check: Called before a run begins.
    """

    def build_or_replace(*positional: Any, **named: Any) -> Any:
        args = _global_args()
        if args is None or not is_dynamic(args):
            end_session()
            return build(*positional, **named)
        check()
        settle_args(args)
        return StepCalculator(start_session(args))

    return build_or_replace


def _global_args() -> argparse.Namespace | None:
    from megatron.training import global_vars

    return global_vars._GLOBAL_ARGS


def loop_condition(stock: bool, frame: Mapping[str, Any]) -> bool:
    """Open the next step, on every rank; False ends the training in the ordinary way."""
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


def count_changed(stock: bool, frame: Mapping[str, Any]) -> bool:
    """A new number of micro-batches is ordinary here: no check, no extra checkpoint."""
    return stock if session() is None else False


def consumed_samples(stock: int, frame: Mapping[str, Any]) -> int:
    """Finish the step that ran (or was skipped), and count its rollouts."""
    run = session()
    if run is None or run.step is None:
        return stock
    size = run.feed.finish_step()
    run.live_args.keep_cursor(run.feed.cursor.to_dict())
    return size

"""How many micro-batches a step has, and how many rollouts, for whoever asks Megatron.

Wrapped: the function that makes the object behind Megatron's module-level calculator functions.
A run under the plugin begins there, when its arguments are known.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron_dynbatch.hooks.arguments import is_dynamic, settle_args
from megatron_dynbatch.hooks.session import Session, end_session, start_session


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

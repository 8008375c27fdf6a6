"""The one place that writes to Megatron's arguments once a training runs.

Megatron saves its arguments with each checkpoint, so what the plugin leaves there travels with it.
"""

from __future__ import annotations

import argparse
from typing import Any


class LiveArgs:
    """What changes among Megatron's arguments while a training runs.

    Args:
        args: Megatron's own object.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    @property
    def consumed_rollouts(self) -> int:
        """Rollouts that were trained, or passed over; Megatron adds those of each step."""
        return int(self._args.consumed_train_samples)

    @consumed_rollouts.setter
    def consumed_rollouts(self, count: int) -> None:
        self._args.consumed_train_samples = count

    def keep_cursor(self, values: dict[str, Any]) -> None:
        """Let the next checkpoint carry a cursor, as `Cursor.to_dict` gives it."""
        self._args.dynbatch_cursor = values

    @property
    def balance(self) -> dict[str, Any] | None:
        """Expert frequencies that checkpoints carry, as `StepBalance.to_dict` gives them."""
        return getattr(self._args, "dynbatch_balance", None)

    @balance.setter
    def balance(self, values: dict[str, Any] | None) -> None:
        self._args.dynbatch_balance = values

    def tell_of_data(self, *, has_evaluation: bool) -> None:
        """Say what there is to train and evaluate on; Megatron's own builders say it otherwise."""
        self._args.do_train = 1
        if not has_evaluation:
            self._args.do_valid = self._args.do_test = 0

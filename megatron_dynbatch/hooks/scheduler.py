"""LR and weight decay advance by the rollouts of the step.

Seam: the increment in `train_step` that is handed to ``opt_param_scheduler.step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dynbatch.hooks.balance import keep_balance
from megatron_dynbatch.hooks.session import session


def scheduler_increment(stock: int, frame: Mapping[str, Any]) -> int:
    """G instead of micro-batches × micro-batch size × DP size."""
    run = session()
    if run is None or run.step is None:
        return stock
    keep_balance(run)  # Megatron asks only after an update that succeeded
    return run.step.step_global_batch_size

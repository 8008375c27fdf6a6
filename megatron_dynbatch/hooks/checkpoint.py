"""The cursor travels with each checkpoint, among Megatron's own saved arguments.

Seam: the place in `load_checkpoint` that reads the consumed samples of the loaded arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.hooks.live_args import LiveArgs
from megatron_dynbatch.hooks.session import session
from megatron_dynbatch.steps import Cursor


def loaded_samples(stock: int, frame: Mapping[str, Any]) -> int:
    """Restore the cursor; the count of consumed samples follows from it.

    Raises:
        ResumeError: The checkpoint was not made under the plugin but has consumed samples.
    """
    run = session()
    if run is None:
        return stock
    saved = getattr(frame["checkpoint_args"], "dynbatch_cursor", None)
    if saved is None:
        if stock:
            raise ResumeError(
                f"the checkpoint counts {stock} consumed samples but carries no rollout cursor: "
                "it was made without --dynamic-global-batch; load it with --finetune to start "
                "counting rollouts at 0"
            )
        return 0
    cursor = Cursor.from_dict(saved)
    run.restore(cursor)
    run.live_args.keep_cursor(saved)
    run.live_args.balance = LiveArgs(frame["checkpoint_args"]).balance
    return cursor.consumed_rollouts

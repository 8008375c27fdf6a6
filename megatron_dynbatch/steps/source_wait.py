"""Before the first batch: the place where rollouts come from must be there. A reader makes none."""

from __future__ import annotations

import time

from megatron_dynbatch.output import progress
from megatron_dynbatch.rollouts import RolloutDataError, RolloutSource

GRACE_SECONDS = 60.0
_POLL_SECONDS = 0.2


def wait_for_source(source: RolloutSource, timeout: float) -> None:
    """Returns when the source is there; says at once if it is not.

    Args:
        source: Where rollout batches come from.
        timeout: Seconds.

    Raises:
        RolloutDataError: It did not come in time, or is something else.
    """
    if source.is_there():
        return
    progress(
        f"{source} is not there; waiting {timeout:.0f} s for the rollout side to make it "
        "(is --rollout-path right?)"
    )
    deadline = time.monotonic() + timeout
    while not source.is_there():
        if time.monotonic() >= deadline:
            raise RolloutDataError(
                f"{source} is not there, looked for during {timeout:g} s: correct --rollout-path, "
                "start the rollout side (or make the directory) first, or give --wait-for-path to "
                "wait for it as long as --batch-timeout"
            )
        time.sleep(min(_POLL_SECONDS, timeout))

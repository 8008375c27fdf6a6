"""How far the batch and its step are, on rank 0: a line of bars, or now and then a line of text."""

from __future__ import annotations

import os

from megatron_dynbatch.hooks.options import TrainingOptions
from megatron_dynbatch.report.progress import ProgressLine
from megatron_dynbatch.steps import Step
from megatron_dynbatch.wording import counted


class StepProgress:
    """Steps of the batch and micro-batches of the step.

    Args:
        line: Where it is shown.
        num_chunks: Model chunks of a rank: each runs every micro-batch.
    """

    def __init__(self, line: ProgressLine, num_chunks: int = 1) -> None:
        self._line = line
        self._num_chunks = num_chunks
        self._step: Step | None = None
        self._passes = 0

    def begin_micro_batch(self, step: Step) -> None:
        """Call it at the start of each forward pass of each model chunk."""
        if step is not self._step:
            self._step, self._passes = step, 0
        self._passes += 1
        if not self._line.is_due:
            return
        total = step.num_microbatches
        done = min(total, -(-self._passes // self._num_chunks))
        self._line.show(
            [
                (f"batch {step.batch_id}, step", step.step_index + 1, len(step.plan.steps)),
                ("micro-batch", done, total),
            ],
            counted(step.step_global_batch_size, "rollout"),
        )

    def clear(self) -> None:
        """Erase the line, before others print or the process ends."""
        self._line.clear()


def step_progress(options: TrainingOptions) -> StepProgress | None:
    """What the options ask for on this rank; None where nothing is shown."""
    if options.step_progress == "off" or os.environ.get("RANK", "0") != "0":
        return None
    bars = {"auto": None, "bar": True, "plain": False}[options.step_progress]
    return StepProgress(ProgressLine(bars=bars), options.layout.vpp)

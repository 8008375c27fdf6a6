"""One line per optimizer step: what was trained, how well it was packed, and what came out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from megatron_dynbatch.report.catalogue import STEP


@dataclass(frozen=True, slots=True)
class StepReport:
    """Counts and results of one step over all ranks.

    Attributes:
        iteration: Optimizer iteration, from 1; the step axis of every log.
        batch_id: Rollout batch that the step belongs to.
        step_index: Step of that batch's plan.
        step_global_batch_size: G, rollouts.
        num_samples: Training sequences.
        num_microbatches: M, micro-batches per data-parallel rank, dummies included.
        num_dummies: Dummy micro-batches over all data-parallel ranks.
        num_tokens: Tokens of the samples, padding not counted.
        num_trained_tokens: N, the sum of all masks.
        fill: Tokens of the samples over the tokens that the micro-batches could hold.
        consumed_rollouts: Rollouts of finished steps, this one included.
        learning_rate: After the step.
        grad_norm: Before clipping; None where Megatron does not know it.
        loss_scale: Of fp16 training, else 1.
        skipped: The optimizer did not step (fp16 overflow).
        metrics: Name → value of everything that the loss function reported.
        fewest_microbatches: The smallest M that no lower bound rules out.
        num_oversize: Samples longer than a micro-batch may be.
        balance: Most loaded data-parallel rank over the bound that no placement beats.
        lockstep: What a collective per micro-batch across ranks pays; 1 is ideal.
        predicted_time: Step time by the plan's cost model, in its unit (seconds if it was measured,
            see `megatron-dynbatch fit-cost`).
        step_time: Seconds between the end of the step before and of this one; None for the first.
        wait_time: Seconds of it that training waited for rollouts to be there, planned and read.
    """

    iteration: int
    batch_id: int
    step_index: int
    step_global_batch_size: int
    num_samples: int
    num_microbatches: int
    num_dummies: int
    num_tokens: int
    num_trained_tokens: int
    fill: float
    consumed_rollouts: int
    learning_rate: float | None
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    metrics: dict[str, float]
    fewest_microbatches: int | None = None
    num_oversize: int = 0
    balance: float | None = None
    lockstep: float | None = None
    predicted_time: float | None = None
    step_time: float | None = None
    wait_time: float | None = None

    def scalars(self) -> dict[str, float]:
        """`train/…` → value of every number of `catalogue.STEP`, and what the loss reported."""
        named = {f"train/{name}": getattr(self, name) for name in STEP}
        named |= {f"train/{name}": value for name, value in self.metrics.items()}
        return {name: float(value) for name, value in named.items() if value is not None}


_FIELDS = tuple(field.name for field in fields(StepReport))


class StepReportWriter:
    """Appends one JSON object per step to a file.

    Args:
        path: JSONL file; its directory is made if needed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def write(self, report: StepReport) -> None:
        """Append one line; it is on disk when this returns. NaN and infinities become null."""
        values = {name: getattr(report, name) for name in _FIELDS}
        try:
            line = json.dumps(values, allow_nan=False)
        except ValueError:
            line = json.dumps(_finite(values))
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_step_reports(path: str | Path) -> list[StepReport]:
    """The reports of a JSONL file, in order."""
    with Path(path).open(encoding="utf-8") as lines:
        return [StepReport(**json.loads(line)) for line in lines]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON knows no NaN
    return value

"""The step feed: which step comes next, with its data, on every rank.

Rank 0 alone looks for the next rollout batch and plans it; every rank waits at the step boundary,
then reads its own rows and compares what it sees with the others. Between two batches' boundaries
no rank talks to another one here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron_dynbatch._version import __version__
from megatron_dynbatch.layout.micro_batch import MicroBatch, pack_micro_batch, slice_packed
from megatron_dynbatch.layout.packed_sequence import PackedSequence
from megatron_dynbatch.layout.stock import stock_batch
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, StepPlan, make_plan
from megatron_dynbatch.rollouts import RolloutSource, Sample, SampleIndex
from megatron_dynbatch.steps.cursor import STEP_OPTIONS, Cursor
from megatron_dynbatch.steps.exchange import Exchange, progress

_POLL_SECONDS = 0.05
_PROGRESS_SECONDS = 10.0

BatchNeeded = Callable[[Cursor], None]


class BatchTimeout(TimeoutError):
    """Neither a batch nor the end of the rollouts came in time."""


class Step:
    """One optimizer step on this rank: its plan, its data, and how far the data was built.

    Args:
        plan: Plan of the batch.
        step_index: Which of its steps.
        batch_id: The rollout batch.
        dp_rank: Data-parallel rank whose micro-batches these are.
        cp_rank: Context-parallel rank, for the slice of each micro-batch.
        samples: Plan row → sample, for the rows of this DP rank.
        width: Laid-out tokens of every micro-batch, or None for each its own length.
        device: Where tensors go.
    """

    def __init__(
        self,
        plan: Plan,
        step_index: int,
        batch_id: int,
        *,
        dp_rank: int,
        cp_rank: int,
        samples: Mapping[int, Sample],
        width: int | None,
        device: torch.device | str,
    ) -> None:
        self.plan = plan
        self.step_index = step_index
        self.batch_id = batch_id
        self.dp_rank = dp_rank
        self.cp_rank = cp_rank
        self.samples = samples
        self.width = width
        self.device = device
        self._packed: dict[int, PackedSequence] = {}
        self._built: dict[int, MicroBatch] = {}

    @property
    def step_plan(self) -> StepPlan:
        """The plan of this step alone."""
        return self.plan.steps[self.step_index]

    @property
    def step_global_batch_size(self) -> int:
        """G: rollouts of the step."""
        return self.step_plan.step_global_batch_size

    @cached_property
    def num_tokens(self) -> int:
        """T: tokens of the step's samples over all ranks, padding not counted."""
        return int(self.plan.index.total_lengths[self.step_plan.samples].sum())

    @property
    def num_microbatches(self) -> int:
        """M: micro-batches that every DP rank runs, dummies included."""
        return self.step_plan.num_microbatches

    def micro_batch(self, k: int) -> MicroBatch:
        """Micro-batch ``k`` of this rank, 0 ≤ k < M, as tensors; built once.

        Raises:
            IndexError: There is no micro-batch ``k``.
        """
        if k not in self._built:
            self._built[k] = slice_packed(
                self.packed(k),
                self.step_plan,
                self.dp_rank,
                self.cp_rank,
                self.plan.layout.cp,
                device=self.device,
            )
        return self._built[k]

    def stock_batch(self, k: int) -> dict[str, torch.Tensor]:
        """Micro-batch ``k`` of this rank in Megatron's SFT batch contract, before the CP slice.

        Raises:
            IndexError: There is no micro-batch ``k``.
        """
        return stock_batch(self.packed(k))

    def packed(self, k: int) -> PackedSequence:
        """Micro-batch ``k`` of this rank as a full sequence on the host.

        Raises:
            IndexError: There is no micro-batch ``k``.
        """
        if not 0 <= k < self.num_microbatches:
            raise IndexError(
                f"step {self.step_index} of rollout batch {self.batch_id} has "
                f"{self.num_microbatches} micro-batches on DP rank {self.dp_rank}; micro-batch "
                f"{k} was asked for"
            )
        if k not in self._packed:
            self._packed[k] = pack_micro_batch(
                self.plan, self.step_index, self.dp_rank, k, self.samples, width=self.width
            )
        return self._packed[k]


class StepFeed:
    """Yields the steps of a training run, one at a time, the same on every rank.

    Args:
        source: Where rollout batches come from.
        layout: Sizes of the parallel groups.
        options: How steps and micro-batches are formed.
        dp_rank: Data-parallel rank of this process (without context parallelism).
        cp_rank: Context-parallel rank of this process.
        exchange: Connects the ranks; a single process by default.
        batch_timeout: Seconds that rank 0 waits for a batch or the end.
        device: Where micro-batches go.
        on_batch_needed: Called on every rank when the next batch is not there yet, before waiting.
    """

    def __init__(
        self,
        source: RolloutSource,
        layout: ParallelLayout,
        options: PlanOptions,
        *,
        dp_rank: int = 0,
        cp_rank: int = 0,
        exchange: Exchange | None = None,
        batch_timeout: float = 1800.0,
        device: torch.device | str = "cpu",
        on_batch_needed: BatchNeeded | None = None,
    ) -> None:
        self.source = source
        self.layout = layout
        self.options = options
        self.dp_rank = dp_rank
        self.cp_rank = cp_rank
        self.exchange = exchange or Exchange.alone()
        self.batch_timeout = batch_timeout
        self.device = device
        self.on_batch_needed = on_batch_needed
        self.cursor = Cursor()
        self._plan: Plan | None = None
        self._origins: list[tuple[int, int]] = []
        self._samples: dict[int, Sample] = {}
        self._step: Step | None = None

    @property
    def width(self) -> int | None:
        """Laid-out tokens of every micro-batch at fixed width, else None."""
        return self.options.capacity(self.layout) if self.options.fixed_width else None

    def restore(self, cursor: Cursor) -> None:
        """Continue at ``cursor``, as saved with a checkpoint.

        Raises:
            ValueError: Options that form steps changed inside a batch.
        """
        cursor.check_options(self._step_options())
        self.cursor = cursor
        self._plan = self._step = None

    def open_step(self) -> Step | None:
        """Open the next step that trains something; None when the rollouts have ended.

        Every rank must call it, at the same place. Steps without a trained token are passed over
        and counted.

        Raises:
            BatchTimeout: On rank 0: neither a batch nor the end came in time.
            RankFailure: On the other ranks: rank 0 or any other rank failed, or ranks disagree.
        """
        if self._step is not None:
            raise RuntimeError("finish_step() was not called for the step that is open")
        while True:
            if self._plan is None and not self._next_batch():
                return None
            assert self._plan is not None
            step = Step(
                self._plan,
                self.cursor.step_index,
                self.cursor.batch_id,
                dp_rank=self.dp_rank,
                cp_rank=self.cp_rank,
                samples=self._samples,
                width=self.width,
                device=self.device,
            )
            self._step = step
            if step.step_plan.num_trained_tokens > 0:
                return step
            self.finish_step()

    def finish_step(self) -> int:
        """Count the open step as consumed and move the cursor; returns its G."""
        step, plan = self._step, self._plan
        if step is None or plan is None:
            raise RuntimeError("no step is open")
        self._step = None
        size = step.step_global_batch_size
        empty = step.step_plan.num_trained_tokens == 0
        self.cursor = self.cursor.after_step(size, empty=empty)
        if self.cursor.step_index == len(plan.steps):
            self._close_batch(plan)
        return size

    def _close_batch(self, plan: Plan) -> None:
        carried = tuple(self._origins[row] for row in plan.carried)
        dropped = np.unique(plan.index.rollout_indices[list(plan.dropped)]).size
        self.cursor = self.cursor.after_batch(carried, int(dropped))
        self._plan, self._samples, self._origins = None, {}, []

    def _next_batch(self) -> bool:
        """Get the plan of the batch at the cursor on every rank; False at the end."""
        while True:
            message = self._announcement()
            if message["kind"] == "end":
                return False
            plan = Plan.from_json(message["plan"])
            self._origins = [(int(batch), int(row)) for batch, row in message["origins"]]
            with self.exchange.failing():
                self._samples = self._read_own_rows(plan)
            self.exchange.compare(self._facts(plan))
            self.cursor = Cursor.from_dict(
                {**self.cursor.to_dict(), "step_options": self._step_options()}
            )
            self._plan = plan
            if self.cursor.step_index < len(plan.steps):
                return True
            self._close_batch(plan)  # a batch whose rollouts were all carried or dropped

    def _announcement(self) -> dict[str, Any]:
        waiting = f"rank 0 to announce rollout batch {self.cursor.batch_id}"
        patience = self.batch_timeout + self.exchange.timeout
        if self.on_batch_needed is not None:
            state = self.exchange.broadcast(self._state, waiting, patience)
            if state == "absent":
                with self.exchange.failing():
                    self.on_batch_needed(self.cursor)
        return self.exchange.broadcast(self._announce, waiting, patience)

    def _state(self) -> str:
        return self.source.state(self.cursor.batch_id)

    def _announce(self) -> dict[str, Any]:
        """On rank 0: wait for the batch, plan it, and say what every rank must know."""
        state = self._wait_for_batch()
        carried = list(self.cursor.carried)
        if state == "end" and self.cursor.batch_id == 0:
            raise ValueError(f"{self.source} was closed without a single rollout")
        if state == "end" and not carried:
            return {"kind": "end"}
        parts = [self._carried_index(carried)] if carried else []
        origins = carried
        if state == "present":
            index = self.source.index(self.cursor.batch_id)
            rows = range(len(index.total_lengths))
            origins = carried + [(self.cursor.batch_id, row) for row in rows]
            parts.append(index)
        plan = make_plan(
            SampleIndex.concat(parts), self.layout, self.options, last=state == "end"
        )
        plan.check()
        return {"kind": "plan", "plan": plan.to_json(), "origins": origins}

    def _wait_for_batch(self) -> str:
        start = time.monotonic()
        next_line = start + _PROGRESS_SECONDS
        while (state := self._state()) == "absent":
            now = time.monotonic()
            if now - start > self.batch_timeout:
                raise BatchTimeout(
                    f"neither rollout batch {self.cursor.batch_id} nor an END marker appeared in "
                    f"{self.source} within {self.batch_timeout:.0f} s; look at the rollout side, "
                    "or raise --batch-timeout"
                )
            if now > next_line:
                progress(
                    f"waiting for rollout batch {self.cursor.batch_id} in {self.source} "
                    f"({now - start:.0f} s)"
                )
                next_line = now + _PROGRESS_SECONDS
            time.sleep(_POLL_SECONDS)
        return state

    def _carried_index(self, origins: list[tuple[int, int]]) -> SampleIndex:
        by_batch = _rows_by_batch(origins)
        return SampleIndex.concat(
            [self.source.index(batch).take(rows) for batch, rows in by_batch.items()]
        )

    def _read_own_rows(self, plan: Plan) -> dict[int, Sample]:
        steps = plan.steps[self.cursor.step_index :]
        wanted = sorted({r for s in steps for m in s.micro_batches[self.dp_rank] for r in m})
        place = {self._origins[row]: row for row in wanted}
        samples: dict[int, Sample] = {}
        for batch, rows in _rows_by_batch([self._origins[row] for row in wanted]).items():
            for row, sample in zip(rows, self.source.read(batch, rows), strict=True):
                samples[place[batch, row]] = sample
        for row, sample in samples.items():
            batch, own_row = self._origins[row]
            seen = (sample.total_length, sample.mask_sum)
            planned = (int(plan.index.total_lengths[row]), int(plan.index.mask_sums[row]))
            if seen != planned:
                raise ValueError(
                    f"row {own_row} of rollout batch {batch} in {self.source} has (length, trained "
                    f"tokens) {seen} but was planned with {planned}: the batch changed after it "
                    "was announced"
                )
        return samples

    def _facts(self, plan: Plan) -> dict[str, str]:
        """What must be equal on all ranks before a batch is trained."""
        return {
            "package version": __version__,
            "plan": plan.fingerprint,
            "options": str(asdict(self.options)),
            "layout": str(asdict(self.layout)),
            "cursor": str(self.cursor.to_dict()),
        }

    def _step_options(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in STEP_OPTIONS}


def _rows_by_batch(origins: list[tuple[int, int]]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for batch, row in origins:
        rows.setdefault(batch, []).append(row)
    return rows

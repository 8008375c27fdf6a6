"""The step feed: which step comes next, with its data, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutSource, Sample
from megatron_dynbatch.steps.config import FeedConfig
from megatron_dynbatch.steps.cursor import STEP_OPTIONS, Cursor
from megatron_dynbatch.steps.empty_batches import EmptyBatches
from megatron_dynbatch.steps.exchange import Exchange
from megatron_dynbatch.steps.identity import ResumeCheck
from megatron_dynbatch.steps.ledger import Ledger, closing_entry, step_entry
from megatron_dynbatch.steps.loaded_batch import LoadedBatch
from megatron_dynbatch.steps.next_batch import BatchNeeded, NextBatch
from megatron_dynbatch.steps.retention import delete_trained
from megatron_dynbatch.steps.step import Step

BatchOpened = Callable[[LoadedBatch], Mapping[int, Sample]]


class StepFeed:
    """Yields the steps of a training run, one at a time, the same on every rank.

    Args:
        source: Where rollout batches come from.
        layout: Sizes of the parallel groups.
        options: How steps and micro-batches are formed.
        config: What this rank reads, how long it waits, and what is kept.
        exchange: Connects the ranks; a single process by default.
        ledger: Where rank 0 notes which rollouts each step consumed.
        on_batch_needed: Called on every rank when the next batch is not there yet, before waiting.
        on_batch_opened: Called on every rank before the first step of a batch; it may run
            forward-only passes, and returns the samples to train in the place of the batch's.
        **settings: Fields of `config`, one by one.
    """

    def __init__(
        self,
        source: RolloutSource,
        layout: ParallelLayout,
        options: PlanOptions,
        config: FeedConfig | None = None,
        *,
        exchange: Exchange | None = None,
        ledger: Ledger | None = None,
        on_batch_needed: BatchNeeded | None = None,
        on_batch_opened: BatchOpened | None = None,
        **settings: Any,
    ) -> None:
        self.source = source
        self.layout = layout
        self.options = options
        self.config = replace(config or FeedConfig(), **settings)
        self.exchange = exchange or Exchange.alone()
        self.ledger = ledger if self.exchange.rank == 0 else None
        if self.ledger is not None:
            with self.exchange.failing():
                self.ledger.open()
        self.on_batch_needed = on_batch_needed
        self.on_batch_opened = on_batch_opened
        self.cursor = Cursor()
        self._empty_batches = EmptyBatches(self.config.max_empty_batches)
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._next = NextBatch(
            source, layout, options, self.config, self.exchange, self._pack_first_step
        )
        self._batch: LoadedBatch | None = None
        self._step: Step | None = None

    @property
    def width(self) -> int | None:
        """Laid-out tokens of every micro-batch at fixed width, else None."""
        return self.options.capacity(self.layout) if self.options.fixed_width else None

    def restore(self, cursor: Cursor) -> None:
        """Continue at ``cursor``, as saved with a checkpoint.

        `open_step` raises ResumeError if the rollouts are not those of the checkpoint.

        Raises:
            ResumeError: Options that form steps changed inside a batch.
        """
        cursor.check_options(self._step_options())
        self._next.restart(ResumeCheck(cursor, self.source, moved=self.config.rollouts_moved))
        self.cursor = cursor
        self._batch = self._step = None

    def close(self) -> None:
        """End the threads; `open_step` starts them again."""
        self._next.close()

    def open_step(self) -> Step | None:
        """Open the next step that trains something; None when the rollouts have ended.

        Every rank must call it, at the same place. Steps without a trained token are passed over
        and counted.

        Raises:
            BatchTimeout: On rank 0: neither a batch nor the end came in time.
            RolloutDataError: A batch or the source is missing, or several in a row train nothing.
            RankFailure: On the other ranks: rank 0 or any other rank failed, or ranks disagree.
        """
        if self._step is not None:
            raise RuntimeError("finish_step() was not called for the step that is open")
        start = time.monotonic()
        while True:
            if self._batch is None and not self._open_batch():
                return None
            assert self._batch is not None
            step = self._step = self._make_step(self._batch, self.cursor.step_index)
            if step.step_plan.num_trained_tokens > 0:
                self._work_ahead(self._batch, step)
                step.wait_seconds = time.monotonic() - start
                return step
            self.finish_step()

    def finish_step(self) -> int:
        """Count the open step as consumed and move the cursor; returns its G."""
        step, batch = self._step, self._batch
        if step is None or batch is None or batch.plan is None:
            raise RuntimeError("no step is open")
        self._step = None
        del batch.steps[step.step_index]
        size = step.step_global_batch_size
        empty = step.step_plan.num_trained_tokens == 0
        if self.ledger is not None:
            with self.exchange.failing():
                self.ledger.append(step_entry(batch.plan, batch.origins, self.cursor))
        self.cursor = self.cursor.after_step(size, empty=empty)
        if self.cursor.step_index == len(batch.plan.steps):
            self._close_batch(batch)
        return size

    def checkpoint_completed(self, cursor: Cursor) -> None:
        """Delete what no resume needs, now that a checkpoint with `cursor` is completed."""
        if self.config.keep_batches is not None and self.exchange.rank == 0:
            delete_trained(self.source, cursor, self.config.keep_batches)

    def _open_batch(self) -> bool:
        """Get the batch at the cursor on every rank; False at the end."""
        while True:
            batch = self._next.get(self.cursor, self.on_batch_needed)
            if batch.announcement.kind == "end":
                return False
            self._empty_batches.look_at(batch, says=self.exchange.rank == 0)
            if batch.plan is not None:
                with self.exchange.failing():
                    self.cursor = self.cursor.in_batch(
                        self._step_options(), batch.steps_digest, batch.announcement.source
                    )
                    has_steps = self.cursor.step_index < len(batch.plan.steps)
                    if self.on_batch_opened is not None and has_steps:
                        self._replace_samples(batch, self.on_batch_opened(batch))
                if has_steps:
                    self._batch = batch
                    return True
            self._close_batch(batch)  # all its rollouts were carried or dropped

    def _close_batch(self, batch: LoadedBatch) -> None:
        if self.ledger is not None:
            with self.exchange.failing():
                entry = closing_entry(batch.plan, batch.origins, self.source, self.cursor)
                self.ledger.append(entry)
        self.cursor = batch.cursor_after(self.cursor)
        self._batch = None

    def _replace_samples(self, batch: LoadedBatch, samples: Mapping[int, Sample]) -> None:
        """Train these samples; what was packed of other ones is forgotten."""
        if samples is not batch.samples:
            batch.samples = dict(samples)
            batch.steps.clear()

    def _make_step(self, batch: LoadedBatch, step_index: int) -> Step:
        if step_index not in batch.steps:
            assert batch.plan is not None
            batch.steps[step_index] = Step(
                batch.plan,
                step_index,
                batch.batch_id,
                dp_rank=self.config.dp_rank,
                cp_rank=self.config.cp_rank,
                samples=batch.samples,
                width=self.width,
                device=self.config.device,
                origins=batch.origins,
            )
        return batch.steps[step_index]

    def _work_ahead(self, batch: LoadedBatch, step: Step) -> None:
        """Pack this step and the next one, and prepare the next batch."""
        assert batch.plan is not None
        step.pack_ahead(self._packer)
        if step.step_index + 1 < len(batch.plan.steps):
            self._make_step(batch, step.step_index + 1).pack_ahead(self._packer)
        self._next.prepare(batch.cursor_after(self.cursor))

    def _pack_first_step(self, batch: LoadedBatch) -> None:
        if batch.plan is not None and batch.first_step < len(batch.plan.steps):
            self._make_step(batch, batch.first_step).pack_ahead(self._packer)

    def _step_options(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in STEP_OPTIONS}

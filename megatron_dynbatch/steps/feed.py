"""The step feed: which step comes next, with its data, on every rank.

Rank 0 alone looks for the next rollout batch and plans it; every rank waits at the step boundary,
has read its own rows, and compares what it sees with the others. All that can be done before the
boundary is done in threads while the batch before it trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import torch

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.handshake import publish_layout
from megatron_dynbatch.output import progress
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutSource, Sample
from megatron_dynbatch.rollouts.flow import publish_progress
from megatron_dynbatch.steps.agreement import (
    batch_facts,
    sample_digests,
    setting_facts,
)
from megatron_dynbatch.steps.announce import Announcer, Staleness, rows_by_batch
from megatron_dynbatch.steps.announced import announced_batch, cursor_after
from megatron_dynbatch.steps.cursor import STEP_OPTIONS, Cursor
from megatron_dynbatch.steps.empty_batches import MOST_IN_A_ROW, EmptyBatches
from megatron_dynbatch.steps.exchange import Exchange
from megatron_dynbatch.steps.identity import ResumeCheck
from megatron_dynbatch.steps.ledger import Ledger, closing_entry, step_entry
from megatron_dynbatch.steps.prefetch import OpenBatch, Prefetch
from megatron_dynbatch.steps.read_rows import (
    check_log_probs,
    read_rows,
    rows_of_rank,
    sample_of_lengths,
)
from megatron_dynbatch.steps.retention import delete_trained
from megatron_dynbatch.steps.source_wait import GRACE_SECONDS, wait_for_source
from megatron_dynbatch.steps.step import Step

BatchNeeded = Callable[[Cursor], None]
BatchOpened = Callable[[OpenBatch], Mapping[int, Sample]]


class BatchTimeout(DynbatchError, TimeoutError):
    """Neither a batch nor the end of the rollouts came in time."""


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
        fields: Optional fields of samples that this rank reads; None: all that there are.
        lengths_only: Samples are not read at all, as on a pipeline stage that neither embeds tokens
            nor computes the loss: they have their lengths, and zeros as tokens and mask.
        staleness: Which rollouts are too old, and what happens to them.
        wait_for_path: Whether the source may come as late as a batch; else it must be there within
            a minute (or `batch_timeout`, if that is less).
        max_empty_batches: Batches in a row that train nothing which are an error.
        keep_batches: Batches to keep before the one that a completed checkpoint stands at; None:
            nothing is deleted.
        job_facts: Field → value of whatever else must be equal on all ranks; compared once.
        ledger: Where rank 0 notes which rollouts each step consumed.
        rollouts_moved: A restored run may find its batches in another source than before.
        on_batch_needed: Called on every rank when the next batch is not there yet, before waiting.
        on_batch_opened: Called on every rank before the first step of a batch; it may run
            forward-only passes, and returns the samples to train in the place of the batch's.
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
        fields: Collection[str] | None = None,
        lengths_only: bool = False,
        staleness: Staleness | None = None,
        wait_for_path: bool = False,
        max_empty_batches: int = MOST_IN_A_ROW,
        keep_batches: int | None = None,
        job_facts: Mapping[str, str] | None = None,
        ledger: Ledger | None = None,
        rollouts_moved: bool = False,
        on_batch_needed: BatchNeeded | None = None,
        on_batch_opened: BatchOpened | None = None,
    ) -> None:
        self.source = source
        self.layout = layout
        self.options = options
        self.dp_rank = dp_rank
        self.cp_rank = cp_rank
        self.exchange = exchange or Exchange.alone()
        self.batch_timeout = batch_timeout
        self.device = device
        self.fields = fields
        self.lengths_only = lengths_only
        self.staleness = staleness or Staleness()
        self.path_timeout = batch_timeout if wait_for_path else min(GRACE_SECONDS, batch_timeout)
        self.keep_batches = keep_batches
        self.job_facts = dict(job_facts or {})
        self.ledger = ledger if self.exchange.rank == 0 else None
        self.rollouts_moved = rollouts_moved
        if self.ledger is not None:
            with self.exchange.failing():
                self.ledger.open()
        self.on_batch_needed = on_batch_needed
        self.on_batch_opened = on_batch_opened
        self.cursor = Cursor()
        self._empty_batches = EmptyBatches(max_empty_batches)
        self._resumed: ResumeCheck | None = None
        self._announcer = Announcer(source, layout, options, self.staleness)
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="pack")
        self._notes = ThreadPoolExecutor(1, thread_name_prefix="notes")
        self._batch: OpenBatch | None = None
        self._prefetch: Prefetch | None = None
        self._step: Step | None = None
        self._num_restored = 0
        self._is_published = False
        self._is_begun = False

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
        self.close()
        self.cursor = cursor
        self._resumed = ResumeCheck(cursor, self.source, moved=self.rollouts_moved)
        self._batch = self._step = None
        self._num_restored += 1

    def close(self) -> None:
        """End the threads; `open_step` starts them again."""
        self._notes.submit(int).result()  # what was to be published is
        if self._prefetch is not None:
            self._prefetch.cancel()
            self._prefetch = None

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
            if self._batch is None and not self._next_batch():
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
        if self.keep_batches is not None and self.exchange.rank == 0:
            delete_trained(self.source, cursor, self.keep_batches)

    def _make_step(self, batch: OpenBatch, step_index: int) -> Step:
        if step_index not in batch.steps:
            assert batch.plan is not None
            batch.steps[step_index] = Step(
                batch.plan,
                step_index,
                batch.batch_id,
                dp_rank=self.dp_rank,
                cp_rank=self.cp_rank,
                samples=batch.samples,
                width=self.width,
                device=self.device,
                origins=batch.origins,
            )
        return batch.steps[step_index]

    def _work_ahead(self, batch: OpenBatch, step: Step) -> None:
        """Pack this step and the next one, and prepare the next batch."""
        assert batch.plan is not None
        step.pack_ahead(self._packer)
        if step.step_index + 1 < len(batch.plan.steps):
            self._make_step(batch, step.step_index + 1).pack_ahead(self._packer)
        if self._prefetch is None:
            self._prefetch = self._prepare(cursor_after(self.cursor, batch))

    def _close_batch(self, batch: OpenBatch) -> None:
        if self.ledger is not None:
            with self.exchange.failing():
                entry = closing_entry(batch.plan, batch.origins, self.source, self.cursor)
                self.ledger.append(entry)
        self.cursor = cursor_after(self.cursor, batch)
        self._batch = None

    def _next_batch(self) -> bool:
        """Get the plan of the batch at the cursor on every rank; False at the end."""
        while True:
            batch = self._agreed_batch()
            if batch.message["kind"] == "end":
                return False
            self._empty_batches.look_at(batch, says=self.exchange.rank == 0)
            if batch.plan is not None:
                with self.exchange.failing():
                    self.cursor = self.cursor.in_batch(
                        self._step_options(), batch.steps_digest, batch.message["source"]
                    )
                    if self.on_batch_opened is not None and self.cursor.step_index < len(
                        batch.plan.steps
                    ):
                        self._replace_samples(batch, self.on_batch_opened(batch))
                if self.cursor.step_index < len(batch.plan.steps):
                    self._batch = batch
                    return True
            self._close_batch(batch)  # all its rollouts were carried or dropped

    def _agreed_batch(self) -> OpenBatch:
        """The batch at the cursor, as all ranks have it."""
        self.exchange.arrive(f"rank 0 to come to rollout batch {self.cursor.batch_id}")
        if not self._is_begun:
            self.exchange.compare({**self._settings(), **self.job_facts})
            patience = self.path_timeout + self.exchange.timeout
            self.exchange.broadcast(self._find_source, f"rank 0 to find {self.source}", patience)
            self._is_begun = True
        waiting = f"rank 0 to announce rollout batch {self.cursor.batch_id}"
        patience = self.batch_timeout + self.exchange.timeout
        if self._resumed is not None:  # before anything is waited for or written there
            self.exchange.broadcast(self._resumed.check, waiting, patience)
        self._publish_layout()
        if self._prefetch is None:
            self._prefetch = self._prepare(self.cursor, self._resumed)
        prefetch = self._prefetch
        progress_of_batch = self.exchange.broadcast(self._progress_of_batch, waiting, patience)
        if progress_of_batch == "absent" and self.on_batch_needed is not None:
            with self.exchange.failing():
                self.on_batch_needed(self.cursor)
        if progress_of_batch != "ready":
            self.exchange.broadcast(self._wait_for_batch, waiting, patience)
        with self.exchange.failing():
            batch = prefetch.result(
                f"rollout batch {self.cursor.batch_id} to be read",
                self.exchange.timeout,
                self._raise_timeout,
            )
        self._prefetch = self._resumed = None
        facts, peer_facts = batch_facts(batch, self.cursor, self.dp_rank)
        self.exchange.compare({**self._settings(), **facts}, peer_facts)
        if self.exchange.rank == 0:
            self.exchange.take_down(self._post_name(batch.batch_id))
            # A note is a file on a slow disk perhaps; training does not wait for it.
            self._notes.submit(_tolerant, lambda: publish_progress(self.source, batch.batch_id))
        return batch

    def _find_source(self) -> None:
        """On rank 0: return when there is a place that batches can come from."""
        if self.on_batch_needed is None:  # which may be what makes it
            wait_for_source(self.source, self.path_timeout)

    def _progress_of_batch(self) -> str:
        """On rank 0: whether the next batch is "ready", only "there", or "absent"."""
        assert self._prefetch is not None
        if self._prefetch.is_done:
            return "ready"
        if self.on_batch_needed is None:
            return "there"  # nobody asks
        return "absent" if self.source.state(self.cursor.batch_id) == "absent" else "there"

    def _wait_for_batch(self) -> None:
        """On rank 0: return when the batch was planned."""
        assert self._prefetch is not None
        what = f"rollout batch {self.cursor.batch_id} in {self.source}"
        self._prefetch.result(what, self.batch_timeout, self._raise_timeout)

    def _raise_timeout(self) -> NoReturn:
        raise BatchTimeout(
            f"neither rollout batch {self.cursor.batch_id} nor an END marker appeared in "
            f"{self.source} within {self.batch_timeout:.0f} s; look at the rollout side, "
            "or raise --batch-timeout"
        )

    def _prepare(self, cursor: Cursor, resumed: ResumeCheck | None = None) -> Prefetch:
        """Start the thread that gets the batch at a cursor."""
        name = self._post_name(cursor.batch_id)

        def look() -> str | None:
            state = self.source.state(cursor.batch_id)
            if resumed is not None:
                resumed.check()  # what was not there at the first look
                if state != "absent":
                    resumed.conclude()
            return None if state == "absent" else state

        def prepare(thread: Prefetch) -> OpenBatch:
            if self.exchange.rank == 0:
                state = thread.wait(look)
                message = self._announcer.announce(cursor, state)
                self.exchange.post(name, message)
            else:
                message = thread.wait(lambda: self.exchange.look(name))
            return self._read_batch(cursor, message)

        return Prefetch(cursor.batch_id, prepare)

    def _read_batch(self, cursor: Cursor, message: dict[str, Any]) -> OpenBatch:
        batch = announced_batch(cursor, message)
        plan = batch.plan
        if plan is None:
            return batch
        batch.stamps = [self.source.stamp(b) for b in sorted(rows_by_batch(batch.origins))]
        rows = rows_of_rank(plan, self.dp_rank, cursor.step_index)
        batch.samples = (
            {row: sample_of_lengths(plan.index, row) for row in rows}
            if self.lengths_only
            else read_rows(self.source, plan.index, batch.origins, rows, self.fields)
        )
        if not self.lengths_only:
            has_all = self.fields is None
            batch.digests = sample_digests(plan, batch.samples, all_fields=has_all)
        if self.staleness.policy == "train" and message["stale_rollouts"]:
            check_log_probs(batch, self.fields)
        if cursor.step_index < len(plan.steps):
            self._make_step(batch, cursor.step_index).pack_ahead(self._packer)
        return batch

    def _replace_samples(self, batch: OpenBatch, samples: Mapping[int, Sample]) -> None:
        """Train these samples; what was packed of other ones is forgotten."""
        if samples is not batch.samples:
            batch.samples = dict(samples)
            batch.steps.clear()

    def _settings(self) -> dict[str, str]:
        return setting_facts(self.options, self.layout, self.staleness)

    def _publish_layout(self) -> None:
        if not self._is_published and self.exchange.rank == 0:
            _tolerant(lambda: publish_layout(self.source, self.layout, self.options))
        self._is_published = True

    def _post_name(self, batch_id: int) -> str:
        return f"{self._num_restored}/{batch_id}"

    def _step_options(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in STEP_OPTIONS}


def _tolerant(publish: Callable[[], None]) -> None:
    """Notes are a service to the rollout side: a read-only directory trains all the same."""
    try:
        publish()
    except OSError as error:
        progress(f"the rollout side is not told of layout and progress ({error})")

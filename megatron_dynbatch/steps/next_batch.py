"""The batch that comes next: found, planned and read in a thread while the one before it trains.

Rank 0 alone looks for it and plans it; every rank reads its own rows. At the step boundary every
rank waits until that is done, and compares what it sees with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.handshake import publish_layout
from megatron_dynbatch.output import progress
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutSource
from megatron_dynbatch.rollouts.flow import publish_progress
from megatron_dynbatch.steps.agreement import batch_facts, setting_facts
from megatron_dynbatch.steps.announce import Announcer
from megatron_dynbatch.steps.announcement import Announcement
from megatron_dynbatch.steps.config import FeedConfig
from megatron_dynbatch.steps.cursor import Cursor
from megatron_dynbatch.steps.exchange import Exchange
from megatron_dynbatch.steps.identity import ResumeCheck
from megatron_dynbatch.steps.loaded_batch import LoadedBatch, load_batch
from megatron_dynbatch.steps.prefetch import Prefetch
from megatron_dynbatch.steps.source_wait import wait_for_source

BatchNeeded = Callable[[Cursor], None]


class BatchTimeout(DynbatchError, TimeoutError):
    """Neither a batch nor the end of the rollouts came in time."""


class NextBatch:
    """Gets one batch after the other, the same on every rank.

    Args:
        source: Where rollout batches come from.
        layout: Sizes of the parallel groups.
        options: How steps and micro-batches are formed.
        config: What this rank reads, and how long it waits.
        exchange: Connects the ranks.
        on_loaded: Called in the thread with a batch that this rank has read.
    """

    def __init__(
        self,
        source: RolloutSource,
        layout: ParallelLayout,
        options: PlanOptions,
        config: FeedConfig,
        exchange: Exchange,
        on_loaded: Callable[[LoadedBatch], None],
    ) -> None:
        self._source = source
        self._layout = layout
        self._options = options
        self._config = config
        self._exchange = exchange
        self._on_loaded = on_loaded
        self._announcer = Announcer(source, layout, options, config.staleness)
        self._notes = ThreadPoolExecutor(1, thread_name_prefix="notes")
        self._resumed: ResumeCheck | None = None
        self._prefetch: Prefetch[LoadedBatch] | None = None
        self._num_restored = 0
        self._is_published = False
        self._is_begun = False

    def restart(self, resumed: ResumeCheck) -> None:
        """Forget what was prepared: the next batch is asked for at the cursor of a checkpoint."""
        self.close()
        self._resumed = resumed
        self._num_restored += 1

    def close(self) -> None:
        """End the threads; they start again when they are needed."""
        self._notes.submit(int).result()  # what was to be published is
        if self._prefetch is not None:
            self._prefetch.cancel()
            self._prefetch = None

    def prepare(self, cursor: Cursor) -> None:
        """Start the thread that gets the batch at a cursor, unless it runs."""
        if self._prefetch is None:
            self._prefetch = Prefetch(cursor.batch_id, lambda thread: self._load(thread, cursor))

    def get(self, cursor: Cursor, on_batch_needed: BatchNeeded | None) -> LoadedBatch:
        """The batch at a cursor, as all ranks have it; every rank must call it at the same place.

        Args:
            cursor: Where training stands.
            on_batch_needed: Called on every rank if the batch is not there yet.

        Raises:
            BatchTimeout: On rank 0: neither a batch nor the end came in time.
            RankFailure: Another rank failed, or ranks disagree.
        """
        exchange = self._exchange
        exchange.arrive(f"rank 0 to come to rollout batch {cursor.batch_id}")
        if not self._is_begun:
            self._begin(may_be_made=on_batch_needed is not None)
        waiting = f"rank 0 to announce rollout batch {cursor.batch_id}"
        patience = self._config.batch_timeout + exchange.timeout
        if self._resumed is not None:  # before anything is waited for or written there
            exchange.broadcast(self._resumed.check, waiting, patience)
        self._publish_layout()
        self.prepare(cursor)
        is_asked_for = on_batch_needed is not None
        state = exchange.broadcast(lambda: self._state(is_asked_for), waiting, patience)
        if state == "absent" and on_batch_needed is not None:
            with exchange.failing():
                on_batch_needed(cursor)
        if state != "ready":
            exchange.broadcast(self._wait, waiting, patience)
        assert self._prefetch is not None
        with exchange.failing():
            batch = self._prefetch.result(
                f"rollout batch {cursor.batch_id} to be read", exchange.timeout, self._give_up
            )
        self._prefetch = self._resumed = None
        facts, peer_facts = batch_facts(batch, cursor, self._config.dp_rank)
        exchange.compare({**self._settings(), **facts}, peer_facts)
        if exchange.rank == 0:
            exchange.take_down(self._post_name(batch.batch_id))
            # A note is a file on a slow disk perhaps; training does not wait for it.
            self._notes.submit(_tolerant, lambda: publish_progress(self._source, batch.batch_id))
        return batch

    def _begin(self, may_be_made: bool) -> None:
        """Compare what is equal for the whole run, and see that there is a source.

        Args:
            may_be_made: Asking for the first batch may be what makes the source.
        """
        self._exchange.compare({**self._settings(), **self._config.job_facts})

        def find_source() -> None:
            if not may_be_made:
                wait_for_source(self._source, self._config.path_timeout)

        patience = self._config.path_timeout + self._exchange.timeout
        self._exchange.broadcast(find_source, f"rank 0 to find {self._source}", patience)
        self._is_begun = True

    def _state(self, is_asked_for: bool) -> str:
        """On rank 0: whether the next batch is "ready", only "there", or "absent"."""
        assert self._prefetch is not None
        if self._prefetch.is_done:
            return "ready"
        if not is_asked_for:
            return "there"  # nobody asks
        return "absent" if self._source.state(self._prefetch.batch_id) == "absent" else "there"

    def _wait(self) -> None:
        """On rank 0: return when the batch was planned."""
        assert self._prefetch is not None
        what = f"rollout batch {self._prefetch.batch_id} in {self._source}"
        self._prefetch.result(what, self._config.batch_timeout, self._give_up)

    def _give_up(self) -> NoReturn:
        assert self._prefetch is not None
        raise BatchTimeout(
            f"neither rollout batch {self._prefetch.batch_id} nor an END marker appeared in "
            f"{self._source} within {self._config.batch_timeout:.0f} s; look at the rollout side, "
            "or raise --batch-timeout"
        )

    def _load(self, thread: Prefetch[LoadedBatch], cursor: Cursor) -> LoadedBatch:
        """In the thread: wait for the batch at a cursor, plan it on rank 0, read own rows."""
        name, resumed = self._post_name(cursor.batch_id), self._resumed

        def look() -> str | None:
            state = self._source.state(cursor.batch_id)
            if resumed is not None:
                resumed.check()  # what was not there at the first look
                if state != "absent":
                    resumed.conclude()
            return None if state == "absent" else state

        if self._exchange.rank == 0:
            announcement = self._announcer.announce(cursor, thread.wait(look))
            self._exchange.post(name, announcement.to_dict())
        else:
            announcement = Announcement.from_dict(thread.wait(lambda: self._exchange.look(name)))
        batch = load_batch(self._source, cursor, announcement, self._config)
        self._on_loaded(batch)
        return batch

    def _settings(self) -> dict[str, str]:
        return setting_facts(self._options, self._layout, self._config.staleness)

    def _publish_layout(self) -> None:
        if not self._is_published and self._exchange.rank == 0:
            _tolerant(lambda: publish_layout(self._source, self._layout, self._options))
        self._is_published = True

    def _post_name(self, batch_id: int) -> str:
        return f"{self._num_restored}/{batch_id}"


def _tolerant(publish: Callable[[], None]) -> None:
    """Notes are a service to the rollout side: a read-only directory trains all the same."""
    try:
        publish()
    except OSError as error:
        progress(f"the rollout side is not told of layout and progress ({error})")

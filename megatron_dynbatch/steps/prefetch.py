"""The next batch, read, validated and planned in a thread while the current one trains.

Rank 0's thread waits for the batch, plans it and posts the plan; every rank's thread then reads its
own rows. Nothing is decided here: the ranks agree at the step boundary, as without prefetching.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from megatron_dynbatch.output import progress
from megatron_dynbatch.steps.exchange import poll_seconds

_POLL_SECONDS = 0.01  # a look may be a call to a file system, while training needs the processor
_PROGRESS_SECONDS = 10.0
_LONGEST_CANCEL_SECONDS = 60.0


class Cancelled(Exception):
    """The thread is no longer wanted."""


class Prefetch[T]:
    """One thread that prepares one batch.

    Args:
        batch_id: The batch.
        prepare: Makes it; calls `wait` for what is not there yet.
    """

    def __init__(self, batch_id: int, prepare: Callable[[Prefetch[T]], T]) -> None:
        self.batch_id = batch_id
        self.is_waiting = True
        self._cancelled = threading.Event()
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(prepare,), daemon=True, name=f"rollout batch {batch_id}"
        )
        _running.add(self)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return self._done.is_set()

    def wait[F](self, look: Callable[[], F | None]) -> F:
        """In the thread: call `look` until it finds something."""
        start = time.monotonic()
        while (found := look()) is None:
            if self._cancelled.wait(max(_POLL_SECONDS, poll_seconds(time.monotonic() - start))):
                raise Cancelled
        self.is_waiting = False
        return found

    def result(self, waiting_for: str, timeout: float, on_timeout: Callable[[], Any]) -> T:
        """The batch; an error of the thread is raised here.

        Args:
            waiting_for: For a line every ten seconds.
            timeout: Seconds that the thread may go on to wait; its own work is not counted.
            on_timeout: Called then; it must raise.
        """
        start = time.monotonic()
        next_line = start + _PROGRESS_SECONDS
        while not self._done.wait(0.1):
            now = time.monotonic()
            if self.is_waiting and now - start > timeout:
                on_timeout()
            if now > next_line:
                progress(f"waiting for {waiting_for} ({now - start:.0f} s)")
                next_line = now + _PROGRESS_SECONDS
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """End the thread soon; `result` must not be called any more."""
        self._cancelled.set()
        self._thread.join(timeout=_LONGEST_CANCEL_SECONDS)

    def _run(self, prepare: Callable[[Prefetch[T]], T]) -> None:
        try:
            self._result = prepare(self)
        except BaseException as error:  # raised where the batch is asked for
            self._error = error
        self._done.set()


_running: weakref.WeakSet[Prefetch[Any]] = weakref.WeakSet()


@atexit.register
def _cancel_all() -> None:
    """A thread inside a call of the job's store when the interpreter ends would abort it."""
    for prefetch in list(_running):
        prefetch.cancel()

"""Stand-ins that do nothing for the parts of torch.cuda with no meaning on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any


class Stream:
    """A stream on which everything has already happened: CPU work is synchronous."""

    cuda_stream = 0
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Answer that all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record and return an event."""
        event = event if event is not None else Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


class Event:
    """An event that holds the wall-clock time of its recording, so that timers still work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Remember the present time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Answer that the event has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between the two recordings."""
        return (end._seconds - self._seconds) * 1e3


class NullContext:
    """A context manager that accepts any argument (devices, streams, memory pools, ranges)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


def always(answer: Any) -> Callable[..., Any]:
    """Make a function that accepts anything and gives one answer.

    A new one for each use: torch.compile refuses a function that stands under two names.
    """

    def answering(*args: Any, **kwargs: Any) -> Any:
        return answer

    return answering


def nothing() -> Callable[..., None]:
    """Make a function that accepts anything and does nothing."""
    return always(None)

"""One line that says how far something is: bars on a terminal, now and then a line of text else.

No thread and no escape codes but those of one line: between two drawings the cursor stands at the
line's start, so whatever else is printed replaces it, and it comes back below.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

Bar = tuple[str, int, int]
"""Label, how many are done, of how many."""

# A drawing takes some 2 ms of one CPU core, so this is 0.2 % of one.
_REDRAW_SECONDS = 1.0
_PLAIN_SECONDS = 10.0
_WIDEST_BAR = 24
_ERASE_LINE = "\033[2K\r"


class ProgressLine:
    """Draws bars, not more often than a reader can follow.

    Args:
        stream: Where to; default: standard error.
        bars: Whether to draw bars; default: if the stream is a terminal and rich is installed.
            Otherwise lines of text appear, at most one in ten seconds.

    Attributes:
        draws_bars: Which of the two.
    """

    def __init__(self, stream: TextIO | None = None, bars: bool | None = None) -> None:
        self._stream = stream or sys.stderr
        self.draws_bars = _can_draw(self._stream) if bars is None else bars
        self._next = time.monotonic() + (0.0 if self.draws_bars else _PLAIN_SECONDS)
        self._drawn = False

    @property
    def is_due(self) -> bool:
        """Whether `show` would draw now."""
        return time.monotonic() >= self._next

    def show(self, bars: Sequence[Bar], note: str = "") -> None:
        """Draw if it is time to.

        Args:
            bars: From the slowest to the fastest.
            note: Stands behind them.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_REDRAW_SECONDS if self.draws_bars else _PLAIN_SECONDS)
        if self.draws_bars:
            self._draw(bars, note)
        else:
            words = [f"{label} {done} of {total}" for label, done, total in bars]
            print(", ".join([*words, *filter(None, [note])]), file=self._stream, flush=True)

    def clear(self) -> None:
        """Erase what is drawn."""
        if self._drawn:
            self._stream.write(_ERASE_LINE)
            self._stream.flush()
            self._drawn = False

    def _draw(self, bars: Sequence[Bar], note: str) -> None:
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        console = Console(file=self._stream, highlight=False, force_terminal=True)
        grid = Table.grid(padding=(0, 1))
        counts = [f"{done}/{total}" for _, done, total in bars]
        words = sum(len(text) + 1 for text in (*counts, *(bar[0] for bar in bars), note))
        room = (console.width - 2 - words) // max(1, len(bars)) - 1
        cells: list[Text | ProgressBar] = []
        for (label, done, total), count in zip(bars, counts, strict=True):
            bar = ProgressBar(total, done, max(1, min(_WIDEST_BAR, room)))
            cells += [Text(label), bar, Text(count)]
        for _ in range(len(cells) + 1):
            grid.add_column(no_wrap=True, overflow="crop")
        grid.add_row(*cells, Text(note))
        with console.capture() as captured:
            console.print(grid, no_wrap=True, width=console.width - 1)
        line = captured.get().splitlines()[0]
        self._stream.write(f"{_ERASE_LINE}{line}\r")
        self._stream.flush()
        self._drawn = True


def _can_draw(stream: TextIO) -> bool:
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True

"""The numbered folders of a rollout directory: which there are, and what is in each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megatron_dynbatch.rollouts.checked_paths import own_folder
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.source import BatchState
from megatron_dynbatch.rollouts.store import batch_number

INDEX = "index.parquet"
PLAN = "plan.json"
KEY = "key"
END = "END"
DELETED = "DELETED"
NOTES = "notes"
BATCH_NAME = re.compile(r"batch-(\d{8,})")

type SlotState = BatchState | Literal["deleted"]

_LOOK_SECONDS = 1.0  # a listing takes long in a directory of many batches
_POLL_SECONDS = 0.1


class Slots:
    """Of one directory.

    Args:
        path: The directory.
        patience: Seconds for which what is seen may be out of date: a shared file system may show
            one folder before another, and a folder before what is in it.
    """

    def __init__(self, path: Path, patience: float) -> None:
        self.path = path
        self._patience = patience
        self._num_checked = 0
        self._fault_since: dict[int, float] = {}
        self._next_look = 0.0

    def folder(self, batch_id: int) -> Path:
        """Where a batch is."""
        return self.path / f"batch-{batch_number(batch_id):08d}"

    def state(self, batch_id: int) -> SlotState:
        """What a number stands for; "absent" also for a folder without any of its files."""
        path = self.folder(batch_id)
        with suppress(FileNotFoundError):
            own_folder(self.path, path.name)  # nothing is read or deleted through a link
        if (path / DELETED).exists():
            return "deleted"
        if (path / INDEX).exists():
            return "present"
        return "end" if (path / END).exists() else "absent"

    def numbers(self) -> list[int]:
        """All numbers that have a folder, in order."""
        matches = (BATCH_NAME.fullmatch(name) for name in os.listdir(self.path))
        return sorted(int(match[1]) for match in matches if match)

    def last(self) -> int:
        """The highest number that has a folder, −1 if there is none."""
        return max(self.numbers(), default=-1)

    def next_number(self) -> int:
        """For a writer: the number after the last one.

        Raises:
            RolloutDataError: A number before it is missing, or stands for nothing.
        """
        deadline = time.monotonic() + self._patience
        while True:
            numbers = self.numbers()
            wrong = self._first_wrong(numbers)
            if wrong is None:
                self._num_checked = len(numbers) and numbers[-1] + 1
                return self._num_checked
            if time.monotonic() >= deadline:
                raise RolloutDataError(self._sentence(wrong, numbers))
            time.sleep(min(_POLL_SECONDS, self._patience))

    def check_waiting_for(self, batch_id: int) -> None:
        """For a reader that finds a batch absent: whether there is any use in waiting.

        Looks once a second at most.

        Raises:
            RolloutDataError: For as long as the patience lasts, a later batch or the end has been
                there without it, or a folder that is no batch.
        """
        now = time.monotonic()
        if now < self._next_look and self._patience > 0:
            return
        self._next_look = now + min(_LOOK_SECONDS, self._patience)
        numbers = [number for number in self.numbers() if number >= batch_id]
        wrong = next((n for n in numbers if self.state(n) == "absent"), None)
        if wrong is None and numbers and self.state(batch_id) == "absent":
            wrong = batch_id
        if wrong is None:
            self._fault_since.clear()
        elif now - self._fault_since.setdefault(wrong, now) >= self._patience:
            raise RolloutDataError(self._sentence(wrong, self.numbers()))

    def _first_wrong(self, numbers: Sequence[int]) -> int | None:
        """The first number, not looked at before, that is no batch; those before all are gone."""
        first = max(self._num_checked, numbers[0] if numbers else 0)
        taken = set(numbers)
        for number in range(first, numbers[-1] + 1 if numbers else 0):
            if number not in taken or self.state(number) == "absent":
                return number
        return None

    def _sentence(self, wrong: int, numbers: Sequence[int]) -> str:
        if wrong in numbers:
            return (
                f"{self.folder(wrong)} is there but is no batch: it has none of {INDEX}, {END} and "
                f"{DELETED}; writers make a batch whole in one move, so something else made this "
                "folder: remove it, or put back what was in it"
            )
        ids = [number for number in numbers if self.state(number) in ("present", "deleted")]
        there = [f"batch{'es' if len(ids) > 1 else ''} {_ranges(ids)}"] if ids else []
        there += [END] if any(self.state(number) == "end" for number in numbers) else []
        are = "are" if len(ids) + len(there) > 2 else "is"
        return (
            f"{self.path}: batch {wrong} is missing although {' and '.join(there)} {are} there; "
            f"something removed {self.folder(wrong).name}, or the file system does not show it: "
            "put it back, or start a run in a new directory"
        )


def _ranges(numbers: Sequence[int]) -> str:
    """“0 to 3, 5”."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts)

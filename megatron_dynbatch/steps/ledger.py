"""The ledger: which rollouts each finished step consumed, so that anyone can add them up.

One JSON object a line, appended by rank 0 when a step is finished or a batch is closed, and on disk
before a checkpoint can have the step (`ledger_file`). A run that was killed and continued from a
checkpoint writes the steps after that checkpoint again; `read_ledger` keeps, of each place in the
stream, what was written last, which is what the weights hold. A rollout is named by its batch and
the row of one of its samples there.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynbatch.output import progress
from megatron_dynbatch.plan import Plan
from megatron_dynbatch.rollouts import RolloutSource, SampleIndex
from megatron_dynbatch.rollouts.content import are_comparable
from megatron_dynbatch.rollouts.kept import is_deleted
from megatron_dynbatch.steps.cursor import Cursor
from megatron_dynbatch.steps.ledger_file import append_line, lines_of, none_of_ours, prepare

_FIRST_KEY = "batch_id"  # of every line

type Rollout = tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """One line.

    Attributes:
        batch_id: The batch whose plan was at work.
        step_index: The step; the number of steps where the batch was closed.
        consumed: Rollouts of the finished step.
        dropped: Rollouts of a closed batch that no step will ever train.
        trained_tokens: N of the step.
        source_id: Of the source of the batch, "" if that is not known.
        stamp: What the batch holds (`rollouts.content`), "" if that is not known.
    """

    batch_id: int
    step_index: int
    consumed: tuple[Rollout, ...] = ()
    dropped: tuple[Rollout, ...] = ()
    trained_tokens: int = 0
    source_id: str = ""
    stamp: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Where in the stream of steps it stands."""
        return self.batch_id, self.step_index


class Ledger:
    """Appends entries to a file.

    Args:
        path: The file; its folder must be there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def open(self) -> None:
        """Before training: mend what a kill or a full disk left, and say so in one line.

        Raises:
            LedgerError: The file cannot be written, or has a line that is none of a ledger.
        """
        mended = prepare(self.path, _FIRST_KEY)
        if mended:
            progress(mended)

    def append(self, entry: Entry) -> None:
        """Add a line, as a whole, whatever happens to the process afterwards.

        Raises:
            LedgerError: It cannot be added, and is not there.
        """
        values = {"batch_id": entry.batch_id, "step_index": entry.step_index}
        values |= {"consumed": entry.consumed, "dropped": entry.dropped}  # type: ignore[dict-item]
        values |= {"trained_tokens": entry.trained_tokens}
        values |= {"source_id": entry.source_id, "stamp": entry.stamp}  # type: ignore[dict-item]
        append_line(self.path, values)


def read_ledger(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries that count, in the order of the stream.

    Torn lines are not looked at, nor are keys that this version does not know.

    Raises:
        LedgerError: A line is none of a ledger; file and line are named.
    """
    entries: list[Entry] = []
    for line in lines_of(Path(path), _FIRST_KEY):
        for values in line.values:
            entry = _entry(values, path, line.number)
            while entries and entries[-1].place >= entry.place:
                entries.pop()
            entries.append(entry)
    return entries


def imbalance(entries: Iterable[Entry], source: RolloutSource, num_batches: int) -> list[str]:
    """What is wrong if every rollout of the first batches should be there exactly once.

    Of a batch that was deleted nobody knows how many rollouts it had; there only a rollout that is
    named twice is told.

    Returns:
        One sentence per batch that is not the one that was trained, and per rollout that is
        missing or there more than once; empty if all balances.
    """
    entries = list(entries)
    kept = [batch_id for batch_id in range(num_batches) if not is_deleted(source, batch_id)]
    changed = _changed(entries, source, kept)
    indices = {batch_id: source.index(batch_id) for batch_id in kept}
    counts = Counter({(b, r): 0 for b, i in indices.items() for r in range(i.num_rollouts)})
    of_deleted: Counter[Rollout] = Counter()
    for entry in entries:
        for batch, row in (*entry.consumed, *entry.dropped):
            if batch in indices:
                counts[batch, int(indices[batch].rollout_indices[row])] += 1
            else:
                of_deleted[batch, row] += 1
    return changed + [
        f"the rollout of row {row} of batch {batch}, which was deleted, is there {count} times"
        for (batch, row), count in sorted(of_deleted.items())
        if count != 1
    ] + [
        f"rollout {rollout} (in order of appearance) of batch {batch} is there {count} times"
        for (batch, rollout), count in sorted(counts.items())
        if count != 1
    ]


def _changed(entries: list[Entry], source: RolloutSource, kept: list[int]) -> list[str]:
    """One sentence for each batch that is there and is not the one that was trained."""
    trained = {entry.batch_id: entry.stamp for entry in entries if entry.batch_id in kept}
    now = {batch_id: source.content_stamp(batch_id) for batch_id in trained}
    return [
        f"rollout batch {batch_id} in {source} is not the one that was trained: it has the stamp "
        f"{now[batch_id]}, then it was {before}"
        for batch_id, before in sorted(trained.items())
        if are_comparable(before, now[batch_id]) and before != now[batch_id]
    ]


def rollouts_of(index: SampleIndex, batch_id: int) -> list[Rollout]:
    """Names of a batch's rollouts."""
    first_rows = np.unique(index.rollout_indices, return_index=True)[1]
    return [(batch_id, int(row)) for row in sorted(first_rows)]


def step_entry(plan: Plan, origins: Sequence[Rollout], cursor: Cursor) -> Entry:
    """The line of the step at the cursor; `origins` is (batch, row) of each plan row."""
    step = plan.steps[cursor.step_index]
    consumed = _names(plan, step.samples.tolist(), origins)
    return _entry_at(cursor, consumed=consumed, trained_tokens=step.num_trained_tokens)


def closing_entry(
    plan: Plan | None, origins: Sequence[Rollout], source: RolloutSource, cursor: Cursor
) -> Entry:
    """The line of a closed batch: what it leaves out, by its plan or because it was too old.

    A rollout of which some samples were trained, or carried, is not dropped.

    Args:
        plan: None if nothing of the batch is trained.
        origins: (batch, row) of each plan row.
        source: Has the batch, unless only the end was there.
        cursor: At the end of the batch.
    """
    offered, batch_id = set(origins), cursor.batch_id
    left_out = [name for name in cursor.carried if name not in offered]  # too old by now
    if source.state(batch_id) == "present":
        own = rollouts_of(source.index(batch_id), batch_id)
        left_out += [name for name in own if name not in offered]
    dropped = _one_each(left_out, source)
    if plan is not None:
        kept = [row for step in plan.steps for row in step.samples.tolist()] + list(plan.carried)
        taken = set(_names(plan, kept, origins))
        dropped += tuple(n for n in _names(plan, plan.dropped, origins) if n not in taken)
    return _entry_at(cursor, dropped=dropped)


def _entry_at(cursor: Cursor, **values: Any) -> Entry:
    stamp = cursor.stamps.get(cursor.batch_id, "")
    return Entry(
        cursor.batch_id, cursor.step_index, source_id=cursor.source_id, stamp=stamp, **values
    )


def _names(plan: Plan, rows: Iterable[int], origins: Sequence[Rollout]) -> tuple[Rollout, ...]:
    first_rows = np.unique(plan.index.rollout_indices, return_index=True)[1]
    found = dict.fromkeys(int(first_rows[plan.index.rollout_indices[row]]) for row in rows)
    return tuple(origins[row] for row in sorted(found))


def _one_each(names: list[Rollout], source: RolloutSource) -> tuple[Rollout, ...]:
    """One name for each rollout that these samples belong to."""
    rollouts: dict[tuple[int, int], Rollout] = {}
    for batch, row in names:
        rollout = int(source.index(batch).rollout_indices[row])
        rollouts.setdefault((batch, rollout), (batch, row))
    return tuple(rollouts.values())


def _entry(values: dict[str, Any], path: str | os.PathLike[str], number: int) -> Entry:
    def names(key: str) -> tuple[Rollout, ...]:
        return tuple((operator.index(batch), operator.index(row)) for batch, row in values[key])

    try:
        return Entry(
            operator.index(values["batch_id"]),
            operator.index(values["step_index"]),
            names("consumed"),
            names("dropped"),
            operator.index(values["trained_tokens"]),
            str(values.get("source_id", "")),
            str(values.get("stamp", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise none_of_ours(path, number, repr(error)) from error

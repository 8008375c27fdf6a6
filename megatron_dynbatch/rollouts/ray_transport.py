"""Rollouts over Ray: an actor holds the queue, the samples lie in the object store.

A rank asks the actor where its rows are and fetches only the objects that hold them: its own part
of a planned batch, without the optional fields unless it wants them. Where no part is just these
rows (another plan is trained), the actor makes one. Ray moves an object once to a node, so that
tensor-, pipeline- and context-parallel ranks of one data-parallel rank share it.

Invariants (asserted by the tests): a write is repeated under one key after the actor failed, so no
batch is lost or doubled. With a journal, a restarted actor has all batches again; without one it
refuses to go on, because batches are gone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError

from megatron_dynbatch.rollouts.batch import RolloutBatch
from megatron_dynbatch.rollouts.checked_paths import check_text
from megatron_dynbatch.rollouts.content import stored_content
from megatron_dynbatch.rollouts.directory import RolloutDirectory
from megatron_dynbatch.rollouts.encoded_batch import (
    EncodedBatch,
    Located,
    decode_batch,
    encode_batch,
    encode_part,
    part_of,
)
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.parquet_file import Blob
from megatron_dynbatch.rollouts.parquet_index import Places, read_index, read_places
from megatron_dynbatch.rollouts.parquet_read import check_fields, read_part
from megatron_dynbatch.rollouts.sample import Sample
from megatron_dynbatch.rollouts.source import BatchState
from megatron_dynbatch.rollouts.store import BatchStore, batch_number, check_key, check_note_name

NAMESPACE = "megatron_dynbatch"
_CALL_SECONDS = 60.0
_RETRY_SECONDS = 0.2
_CUTS_KEPT = 1024  # parts made for ranks: those of the next batch for as many of them


class RolloutHub:
    """The actor: keeps batches in the object store, and in a journal if it has one.

    Args:
        name: What it is called in errors.
        journal: Directory in which every batch is kept until it is deleted.
    """

    def __init__(self, name: str, journal: str | None) -> None:
        self._name = name
        self._journal = None if journal is None else RolloutDirectory(journal)
        self._store: BatchStore[EncodedBatch] = BatchStore(name)
        self._fetched: dict[int, EncodedBatch] = {}
        self._notes: dict[str, str] = {}
        self._id = uuid.uuid4().hex
        self._cuts: dict[tuple[int, tuple[int, ...]], tuple[Any, Any | None]] = {}
        # Set by Ray when it starts the actor anew after a failure.
        self._has_lost_batches = (
            journal is None and ray.get_runtime_context().was_current_actor_reconstructed
        )

    def write(self, batch: EncodedBatch, key: str) -> int:
        """Adds a batch, unless one of that key is there."""
        self._refuse_if_lost()
        if self._journal is None:
            found = self._store.find(key)
            return found if found is not None else self._store.add(_in_object_store(batch), key)
        samples, parts = decode_batch(self._name, batch)
        batch_id = self._journal.write(samples, batch.plan_json, parts=parts, key=key)
        self._fetched.setdefault(batch_id, _in_object_store(batch))
        return batch_id

    def finish(self, is_repeated: bool) -> int:
        """Closes the run; returns the number of batches."""
        self._refuse_if_lost()
        if self._journal is None:
            is_done = is_repeated and self._store.is_finished
            return len(self._store) if is_done else self._store.finish()
        if is_repeated and (count := self._journal.num_batches_if_finished()) is not None:
            return count
        return self._journal.finish()

    def state(self, batch_id: int) -> BatchState:
        """See `RolloutSource.state`."""
        self._refuse_if_lost()
        return (self._journal or self._store).state(batch_id)

    def source_id(self) -> str:
        """See `RolloutSource.source_id`."""
        self._refuse_if_lost()
        return self._id if self._journal is None else self._journal.source_id()

    def index(self, batch_id: int) -> tuple[Any, str | None]:
        """The index of a batch and its plan."""
        batch = self._batch(batch_id)
        return batch.index, batch.plan_json

    def locate(
        self, batch_id: int, rows: Sequence[int]
    ) -> list[Located]:
        """Parts that are these rows and no others."""
        batch = self._batch(batch_id)
        places = read_places(Blob(f"{self._name}, batch {batch_id}", batch.index))
        located: list[Located] = []
        rest: dict[int, dict[int, int]] = {}
        for part, positions in places.by_part(rows).items():
            if len(positions) == np.count_nonzero(places.parts == part):
                refs = part_of(batch, part, places)
                located.append(Located(positions, refs, places.cells(part)))
            else:
                rest[part] = positions
        if rest:
            cut = tuple(sorted(row for positions in rest.values() for row in positions))
            if (batch_id, cut) not in self._cuts:
                self._cuts[batch_id, cut] = self._cut(places, batch, rest, cut)
            cells = places.cells_of(np.array(cut, np.int64))
            positions = {row: n for n, row in enumerate(cut)}
            located.append(Located(positions, self._cuts[batch_id, cut], cells))
        return located

    def _cut(
        self,
        places: Places,
        batch: EncodedBatch,
        by_part: dict[int, dict[int, int]],
        rows: Sequence[int],
    ) -> tuple[Any, Any | None]:
        """Objects that hold these rows; the same ones serve every rank that asks for them."""
        samples: dict[int, Sample] = {}
        for part, positions in by_part.items():
            refs = [ref for ref in part_of(batch, part, places) if ref is not None]
            blobs = [Blob(f"{places.source}, part {part}", content) for content in ray.get(refs)]
            samples |= read_part(blobs, positions, places.cells(part))
        while len(self._cuts) >= _CUTS_KEPT:  # whoever was handed one still has it
            del self._cuts[next(iter(self._cuts))]
        return _put(encode_part([samples[row] for row in rows], rows))

    def delete_before(self, batch_id: int) -> None:
        """Deletes all batches before `batch_id`."""
        self._store.delete_before(batch_id)
        self._fetched = {b: batch for b, batch in self._fetched.items() if b >= batch_id}
        self._cuts = {key: refs for key, refs in self._cuts.items() if key[0] >= batch_id}
        if self._journal is not None:
            self._journal.delete_before(batch_id)

    def publish(self, name: str, text: str) -> None:
        """See `RolloutSource.publish`."""
        self._notes[name] = text
        if self._journal is not None:
            self._journal.publish(name, text)

    def published(self, name: str) -> str | None:
        """See `RolloutSource.published`."""
        if self._journal is not None:
            return self._journal.published(name)
        return self._notes.get(name)

    def _batch(self, batch_id: int) -> EncodedBatch:
        self._refuse_if_lost()
        if self._journal is None:
            return self._store.get(batch_id)
        if batch_id not in self._fetched:
            samples, parts = self._journal.read_parts(batch_id)
            encoded = encode_batch(samples, self._journal.plan_json(batch_id), parts)
            self._fetched[batch_id] = _in_object_store(encoded)
        return self._fetched[batch_id]

    def _refuse_if_lost(self) -> None:
        if self._has_lost_batches:
            raise RolloutDataError(
                f"{self._name}: the Ray actor failed and was started again without its batches; "
                "start a new run under another name from the last checkpoint, with ?journal=DIR "
                "so that batches survive"
            )


class RayRollouts:
    """A transport over a named Ray actor, made by whoever comes first.

    Args:
        name: Of the actor, in the namespace `NAMESPACE`.
        address: HOST:PORT of a Ray cluster that this machine belongs to; None: the one that runs
            on this machine (or that this process is connected to).
        journal: Directory in which the actor keeps batches too; read by whoever makes the actor.
        vocab_size: Token ids must be below it, written or read; None: not checked.
        timeout: Seconds for which calls are repeated while the actor fails or is started again.
    """

    def __init__(
        self,
        name: str,
        *,
        address: str | None = None,
        journal: str | None = None,
        vocab_size: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not ray.is_initialized():
            ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False)
        self._name = name
        self._vocab_size = vocab_size
        self._timeout = timeout
        self._hub: Any = (
            ray.remote(RolloutHub)
            .options(
                name=name,
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",  # outlives whoever made it
                max_restarts=-1,
                num_cpus=0,
            )
            .remote(f"ray actor {name}", journal)
        )

    def __repr__(self) -> str:
        return f"RayRollouts({self._name!r})"

    def write(
        self,
        samples: Iterable[Sample],
        plan_json: str | None = None,
        *,
        parts: Sequence[Sequence[int]] | None = None,
        key: str | None = None,
    ) -> int:
        """Adds a batch. See `RolloutTransport.write`.

        Raises:
            RolloutDataError: `validate_samples` rejects the samples, the run is finished, or the
                actor lost batches.
            RayActorError: The actor could not be reached in time.
        """
        batch = RolloutBatch(samples, vocab_size=self._vocab_size)
        if plan_json is not None:
            check_text("the plan of the batch", plan_json)
        encoded = encode_batch(batch.samples, plan_json, parts)
        key = uuid.uuid4().hex if key is None else check_key(key)
        return self._call(lambda: self._hub.write.remote(encoded, key))

    def finish(self) -> int:
        """Closes the run; returns the number of batches."""
        attempts = iter([False])
        return self._call(lambda: self._hub.finish.remote(next(attempts, True)))

    def is_there(self) -> bool:
        """Always: whoever connects makes the actor; a wrong name is one without batches."""
        return True

    def state(self, batch_id: int) -> BatchState:
        """See `RolloutSource.state`."""
        return self._call(lambda: self._hub.state.remote(batch_number(batch_id)))

    def index(self, batch_id: int) -> SampleIndex:
        """See `RolloutSource.index`."""
        content, _ = self._index(batch_id)
        return read_index(Blob(f"{self}, batch {batch_id}", content), self._vocab_size)

    def read(
        self, batch_id: int, rows: Sequence[int], fields: Collection[str] | None = None
    ) -> list[Sample]:
        """See `RolloutSource.read`; fetches the parts that hold the rows."""
        if not rows:
            check_fields(fields)

        def fetch() -> list[tuple[Located, list[Any]]]:
            located = self._get(self._hub.locate.remote(batch_id, list(rows)))
            wants_all = fields is None or len(fields) > 0
            wanted = [part.refs if wants_all else part.refs[:1] for part in located]
            there = [[ref for ref in refs if ref is not None] for refs in wanted]
            return [(part, self._get(refs)) for part, refs in zip(located, there, strict=True)]

        samples: dict[int, Sample] = {}
        for part, contents in self._repeat(fetch):
            blobs = [Blob(f"{self}, batch {batch_id}", content) for content in contents]
            samples |= read_part(blobs, part.positions, part.cells, fields, self._vocab_size)
        return [samples[row] for row in rows]

    def stamp(self, batch_id: int) -> str:
        """Always "": there is one actor, and it never changes a batch."""
        return ""

    def source_id(self) -> str:
        """The actor's; with a journal that of the journal's directory, "" until there is one."""
        return self._call(lambda: self._hub.source_id.remote())

    def content_stamp(self, batch_id: int, *, verify: bool = False) -> str:
        """See `RolloutSource.content_stamp`; the actor never changes a batch."""
        content, _ = self._index(batch_id)
        return stored_content(Blob(f"{self}, batch {batch_id}", content)) or ""

    def plan_json(self, batch_id: int) -> str | None:
        """See `RolloutSource.plan_json`."""
        return self._index(batch_id)[1]

    def delete_before(self, batch_id: int) -> None:
        """See `RolloutSource.delete_before`."""
        self._call(lambda: self._hub.delete_before.remote(batch_id))

    def publish(self, name: str, text: str) -> None:
        """See `RolloutSource.publish`."""
        check_note_name(name)
        check_text(f"note {name!r}", text)
        self._call(lambda: self._hub.publish.remote(name, text))

    def published(self, name: str) -> str | None:
        """See `RolloutSource.published`."""
        check_note_name(name)
        return self._call(lambda: self._hub.published.remote(name))

    def _index(self, batch_id: int) -> tuple[Any, str | None]:
        return self._call(lambda: self._hub.index.remote(batch_number(batch_id)))

    def _call(self, call: Callable[[], Any]) -> Any:
        return self._repeat(lambda: self._get(call()))

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=_CALL_SECONDS)
        except RayTaskError as error:
            raise error.cause from None

    def _repeat[T](self, action: Callable[[], T]) -> T:
        """Calls `action`, again for a bounded time while the actor or its objects are gone."""
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return action()
            except (RayActorError, ObjectLostError, GetTimeoutError):
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_SECONDS)


def _in_object_store(batch: EncodedBatch) -> EncodedBatch:
    """The same batch with references in the place of its parts; they belong to the caller."""
    return batch._replace(parts=[_put(part) for part in batch.parts])


def _put(part: tuple[Any, Any | None]) -> tuple[Any, Any | None]:
    required, optional = part
    return ray.put(required), None if optional is None else ray.put(optional)

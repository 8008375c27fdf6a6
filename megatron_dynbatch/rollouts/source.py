"""What training and the rollout side ask of a transport, whichever it is (files, a queue, Ray)."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal, Protocol

from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.sample import Sample

type BatchState = Literal["present", "end", "absent"]


class RolloutSource(Protocol):
    """Batches numbered 0, 1, 2…, each complete and unchanging from the moment it is present."""

    def is_there(self) -> bool:
        """Whether there is a place for batches, be there any or not; asking makes none."""
        ...

    def state(self, batch_id: int) -> BatchState:
        """Whether the batch is there; never waits.

        "end": the run is closed and has no such batch; "absent": it may still come. A batch that
        was deleted is an error.
        """
        ...

    def index(self, batch_id: int) -> SampleIndex:
        """Lengths and ids of all rows of a present batch; moves no tokens."""
        ...

    def read(
        self, batch_id: int, rows: Sequence[int], fields: Collection[str] | None = None
    ) -> list[Sample]:
        """These rows of a present batch, in the order asked; moves nothing else.

        Args:
            batch_id: The batch.
            rows: Row numbers, 0 ≤ row < S.
            fields: Optional fields of `Sample` to fill in; None: all that there are. Tokens, loss
                mask and ids always come.
        """
        ...

    def stamp(self, batch_id: int) -> str:
        """What tells a present batch from any other that ever had its number.

        Equal for all readers that see the same batch; "" where readers cannot see different ones.
        """
        ...

    def source_id(self) -> str:
        """What tells these batches from those of any other source.

        It stays wherever the batches are moved; "" if it is not known (yet).
        """
        ...

    def content_stamp(self, batch_id: int, *, verify: bool = False) -> str:
        """What a present batch holds: equal for the same samples, wherever they are written.

        Args:
            batch_id: The batch.
            verify: Whether it is found anew from the checksums of all rows.
        """
        ...

    def plan_json(self, batch_id: int) -> str | None:
        """The plan that the rollout side left with a present batch, or None."""
        ...

    def delete_before(self, batch_id: int) -> None:
        """Deletes all batches with lower numbers; only a completed checkpoint can allow it."""
        ...

    def publish(self, name: str, text: str) -> None:
        """Leaves a note for the other side, in the place of an older one of that name."""
        ...

    def published(self, name: str) -> str | None:
        """The latest note of that name, or None."""
        ...


class RolloutTransport(RolloutSource, Protocol):
    """A source, and the rollout side's way to fill it."""

    def write(
        self,
        samples: Iterable[Sample],
        plan_json: str | None = None,
        *,
        parts: Sequence[Sequence[int]] | None = None,
        key: str | None = None,
    ) -> int:
        """Adds a batch as a whole; returns its id.

        Args:
            samples: At least one sample; siblings share a rollout_id.
            plan_json: The text of a plan for this batch, kept beside it.
            parts: Rows that one reader takes together, for each such reader, in its order.
            key: Names what is in the batch. A second batch of the same key is not added: the id of
                the first is returned, so a write whose outcome is unknown can be repeated.
        """
        ...

    def finish(self) -> int:
        """Closes the run: no batch follows. Returns the number of batches."""
        ...

"""What training asks of a transport, whichever it is (files, a queue, Ray)."""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.sample import Sample

type BatchState = Literal["present", "end", "absent"]


class RolloutSource(Protocol):
    """Batches numbered 0, 1, 2…, each complete and unchanging from the moment it is present."""

    def state(self, batch_id: int) -> BatchState:
        """Whether the batch is there; never waits.

        "end": the run is closed and has no such batch; "absent": it may still come.
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

    def plan_json(self, batch_id: int) -> str | None:
        """The plan that the rollout side left with a present batch, or None."""
        ...

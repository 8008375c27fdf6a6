"""The errors of this package."""

from collections.abc import Sequence

from megatron_dynbatch.errors import DynbatchError


class RolloutDataError(DynbatchError, ValueError):
    """Rollout data that cannot be trained on: what is wrong, where, and what to do.

    Attributes:
        faults: One sentence per fault, naming row and field where there is one.
    """

    def __init__(self, message: str, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults) or (message,)


class BatchDeleted(RolloutDataError):
    """A batch that retention deleted, because a completed checkpoint lay beyond it."""

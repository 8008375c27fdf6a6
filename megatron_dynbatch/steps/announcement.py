"""`Announcement`: what rank 0 tells every rank of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

type Origin = tuple[int, int]
"""Rollout batch, and row in it."""
type Origins = Sequence[Origin]


@dataclass(frozen=True)
class Announcement:
    """What of a batch is trained, and by what plan.

    Attributes:
        kind: "plan", "nothing" (all of it was too old), or "end" (no batch follows).
        plan: JSON of the plan, "" without one.
        origins: Where each plan row comes from.
        source: `source_id`, `source_name` and `stamps` of the batches that the plan draws on, as a
            cursor keeps them.
        stale_rollouts: Rollouts that are older than the limit.
        dropped_rollouts: Those of them that are left out.
    """

    kind: Literal["plan", "nothing", "end"]
    plan: str = ""
    origins: tuple[Origin, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)
    stale_rollouts: int = 0
    dropped_rollouts: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the way back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Announcement:
        """The announcement that `to_dict` made, also by way of JSON."""
        origins = tuple((batch, row) for batch, row in values["origins"])
        return cls(**{**values, "origins": origins})


def rows_by_batch(origins: Origins) -> dict[int, list[int]]:
    """Batch → its rows, in order."""
    rows: dict[int, list[int]] = {}
    for batch, row in origins:
        rows.setdefault(batch, []).append(row)
    return rows

"""The cursor: which rollout is next. It is the truth that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.rollouts.content import are_comparable

# Options that decide which rollouts form a step; they must not change inside a batch.
STEP_OPTIONS = ("rollouts_per_step", "leftover", "loss_reduction", "step_splitter")


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the stream of rollout batches, before the step that comes next.

    Attributes:
        batch_id: Batch whose steps are being trained.
        step_index: Next step of that batch's plan.
        carried: ``(batch_id, row)`` of samples kept from earlier batches; they precede the batch's
            own rows in its plan.
        consumed_rollouts: Rollouts of finished steps (trained, overflowed or empty).
        dropped_rollouts: Rollouts left out by the ``drop`` policies.
        empty_steps: Steps without a trained token, which were passed over.
        stale_rollouts: Rollouts that were older than the limit, dropped or trained.
        step_options: The options of `STEP_OPTIONS` under which the batch was planned.
        steps_digest: Hash of which rows are in which step of the batch, None before it is planned.
        source_id: Of the source of the batches, "" if that is not known.
        source_name: What the source is called, a path for example.
        stamps: Batch → what it holds (`rollouts.content`), of the batch at work, of the last one
            before it, and of those that samples are carried from.
    """

    batch_id: int = 0
    step_index: int = 0
    carried: tuple[tuple[int, int], ...] = ()
    consumed_rollouts: int = 0
    dropped_rollouts: int = 0
    empty_steps: int = 0
    stale_rollouts: int = 0
    step_options: Mapping[str, Any] | None = None
    steps_digest: str | None = None
    source_id: str = ""
    source_name: str = ""
    stamps: Mapping[int, str] = field(default_factory=dict)

    @property
    def first_batch(self) -> int:
        """The earliest batch that is still read from here on."""
        return min([self.batch_id, *(batch for batch, _ in self.carried)])

    def in_batch(
        self, step_options: Mapping[str, Any], steps_digest: str, source: Mapping[str, Any]
    ) -> Cursor:
        """The cursor when the batch is planned.

        Args:
            step_options: Under which it is planned.
            steps_digest: Of its plan.
            source: `source_id`, `source_name` and `stamps`, as of a cursor.

        Raises:
            ResumeError: A batch that was trained or carried from has changed; or some of the steps
                are trained, and those were other steps.
        """
        stamps = _numbered(source["stamps"])
        for batch_id, now in stamps.items():
            before = self.stamps.get(batch_id, "")
            if are_comparable(before, now) and before != now:
                raise changed_batch(batch_id, before, now, source["source_name"])
        if self.step_index > 0 and self.steps_digest not in (None, steps_digest):
            raise ResumeError(
                f"the checkpoint stands at step {self.step_index} of rollout batch "
                f"{self.batch_id}, but now other rollouts form its steps: a step splitter, cap, "
                "oversize policy, layout or staleness limit has changed, or the batch; finish the "
                "batch with the old ones"
            )
        return replace(
            self,
            step_options=dict(step_options),
            steps_digest=steps_digest,
            **{**source, "stamps": dict(sorted({**self.stamps, **stamps}.items()))},
        )

    def after_step(self, step_global_batch_size: int, *, empty: bool) -> Cursor:
        """The cursor when the step is finished, still inside its batch."""
        return replace(
            self,
            step_index=self.step_index + 1,
            consumed_rollouts=self.consumed_rollouts + step_global_batch_size,
            empty_steps=self.empty_steps + int(empty),
        )

    def after_batch(
        self,
        carried: tuple[tuple[int, int], ...],
        dropped_rollouts: int,
        stale_rollouts: int = 0,
    ) -> Cursor:
        """The cursor at the start of the next batch."""
        known = {max(self.stamps, default=0), *(batch for batch, _ in carried)}
        return replace(
            self,
            batch_id=self.batch_id + 1,
            step_index=0,
            carried=carried,
            dropped_rollouts=self.dropped_rollouts + dropped_rollouts,
            stale_rollouts=self.stale_rollouts + stale_rollouts,
            step_options=None,
            steps_digest=None,
            stamps={batch: stamp for batch, stamp in self.stamps.items() if batch in known},
        )

    def check_options(self, now: Mapping[str, Any]) -> None:
        """Raise ResumeError if options that form steps changed in the middle of a batch."""
        if self.step_index == 0 or self.step_options is None:
            return
        for name, before in self.step_options.items():
            if now.get(name) != before:
                raise ResumeError(
                    f"the checkpoint stands at step {self.step_index} of rollout batch "
                    f"{self.batch_id}, planned with {name}={before!r}, but now {name}="
                    f"{now.get(name)!r}: finish the batch with the old value, or change it at a "
                    "batch boundary"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint or JSON."""
        values = {name: getattr(self, name) for name in _FIELDS}
        if self.step_options is not None:
            values["step_options"] = dict(self.step_options)
        values["stamps"] = dict(self.stamps)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """Inverse of `to_dict`; fields that a version before did not have are as by default."""
        carried = tuple((int(batch), int(row)) for batch, row in values["carried"])
        stamps = _numbered(values.get("stamps", {}))
        return cls(**{**values, "carried": carried, "stamps": stamps})


def changed_batch(batch_id: int, before: str, now: str, source: str) -> ResumeError:
    """The error of a batch that is not what the checkpoint was trained on."""
    return ResumeError(
        f"rollout batch {batch_id} is not the one that the checkpoint was trained on: {source} has "
        f"one with the stamp {now}, then it was {before}; put the old batch back, or resume from a "
        "checkpoint that lies before it"
    )


def _numbered(stamps: Mapping[Any, str]) -> dict[int, str]:
    """JSON has made strings of the numbers of batches."""
    return {int(batch): stamp for batch, stamp in stamps.items()}


_FIELDS = tuple(field.name for field in fields(Cursor))

"""The cursor: which rollout is next. It is the truth that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.rollouts.content import are_comparable
from megatron_dynbatch.wording import short

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
        """Inverse of `to_dict`; fields that a version before did not have are as by default.

        Raises:
            ResumeError: A field is missing, unknown or of another kind; it is named.
        """
        if not isinstance(values, Mapping):
            raise _damaged(f"it is {short(values)}")
        if missing := [name for name in _REQUIRED if name not in values]:
            raise _damaged(f"{missing[0]} is missing")
        if unknown := [name for name in values if name not in _FIELDS]:
            raise _damaged(f"it has a field {short(unknown[0])}, which is unknown here")
        for name, (is_right, wanted) in _KINDS.items():
            if name in values and not is_right(values[name]):
                raise _damaged(f"{name} is {short(values[name])}, not {wanted}")
        carried = tuple((batch, row) for batch, row in values["carried"])
        if len(set(carried)) < len(carried):
            raise _damaged("carried names a sample twice")
        if carried and max(batch for batch, _ in carried) >= values["batch_id"]:
            raise _damaged(f"carried names a sample that is not before batch {values['batch_id']}")
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
# What the cursor of every version has; later ones have a default, which is what they meant before.
_REQUIRED = (
    "batch_id", "step_index", "carried", "consumed_rollouts", "dropped_rollouts", "empty_steps",
)  # fmt: skip


def _damaged(what: str) -> ResumeError:
    return ResumeError(
        f"the rollout cursor of the checkpoint cannot be used: {what}; it is damaged or of another "
        "version of megatron_dynbatch: resume with that version, or from another checkpoint"
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_places(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(place, (list, tuple)) and len(place) == 2 and all(map(_is_count, place))
        for place in value
    )


def _are_options(value: object) -> bool:
    is_mapping = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    return value is None or is_mapping


def _are_stamps(value: object) -> bool:
    # JSON has made strings of the numbers of batches.
    return isinstance(value, Mapping) and all(
        isinstance(stamp, str)
        and (_is_count(batch) or (isinstance(batch, str) and batch.isdecimal() and len(batch) < 19))
        for batch, stamp in value.items()
    )


_Kind = tuple[Callable[[object], bool], str]
_COUNT: _Kind = _is_count, "a number from 0 to 2^63 − 1"
_KINDS: dict[str, _Kind] = {
    "batch_id": _COUNT,
    "step_index": _COUNT,
    "carried": (_are_places, "pairs (batch, row)"),
    "consumed_rollouts": _COUNT,
    "dropped_rollouts": _COUNT,
    "empty_steps": _COUNT,
    "stale_rollouts": _COUNT,
    "step_options": (_are_options, "options by name"),
    "steps_digest": (lambda value: value is None or isinstance(value, str), "text"),
    "source_id": (lambda value: isinstance(value, str), "text"),
    "source_name": (lambda value: isinstance(value, str), "text"),
    "stamps": (_are_stamps, "text by batch"),
}

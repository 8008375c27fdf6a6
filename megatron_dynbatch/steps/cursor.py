"""The cursor: which rollout is next. It is the truth that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_dynbatch.errors import ResumeError

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

    @property
    def first_batch(self) -> int:
        """The earliest batch that is still read from here on."""
        return min([self.batch_id, *(batch for batch, _ in self.carried)])

    def in_batch(self, step_options: Mapping[str, Any], steps_digest: str) -> Cursor:
        """The cursor when the batch is planned.

        Raises:
            ResumeError: Some of its steps are trained, and those were other steps.
        """
        if self.step_index > 0 and self.steps_digest not in (None, steps_digest):
            raise ResumeError(
                f"the checkpoint stands at step {self.step_index} of rollout batch "
                f"{self.batch_id}, but now other rollouts form its steps: a step splitter, cap, "
                "oversize policy, layout or staleness limit has changed, or the batch; finish the "
                "batch with the old ones"
            )
        return replace(self, step_options=dict(step_options), steps_digest=steps_digest)

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
        return replace(
            self,
            batch_id=self.batch_id + 1,
            step_index=0,
            carried=carried,
            dropped_rollouts=self.dropped_rollouts + dropped_rollouts,
            stale_rollouts=self.stale_rollouts + stale_rollouts,
            step_options=None,
            steps_digest=None,
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
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cursor:
        """Inverse of `to_dict`."""
        carried = tuple((int(batch), int(row)) for batch, row in values["carried"])
        return cls(**{**values, "carried": carried})


_FIELDS = tuple(field.name for field in fields(Cursor))

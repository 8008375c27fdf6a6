"""`Plan`: the steps of one batch, with their guarantees and their forms as JSON and as lists."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.check import check_plan
from megatron_dynbatch.plan.list_form import Schedule, data_from_schedule, plan_to_schedule
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.plan_data import PlanData
from megatron_dynbatch.plan.step_plan import StepPlan
from megatron_dynbatch.rollouts.index import SampleIndex
from megatron_dynbatch.rollouts.strict_json import parse_json
from megatron_dynbatch.wording import short

FORMAT_VERSION = 1
INDEX_FIELDS = ("total_lengths", "response_lengths", "mask_sums", "rollout_ids", "group_ids")

# What comes of reading JSON that is damaged, of another shape, or too deep or too large.
NOT_A_PLAN = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Plan(PlanData):
    """The steps of one batch, with all that is done with them; fields as in `PlanData`."""

    def check(self) -> None:
        """Verify every guarantee of a plan.

        Raises:
            PlanError: Names the guarantee, the step, the rank and the sample.
        """
        check_plan(self)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON: equal on all ranks that agree on the plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no white space."""
        values = {
            "version": FORMAT_VERSION,
            "layout": self.layout.to_dict(),
            "options": self.options.to_dict(),
            "index": {name: getattr(self.index, name).tolist() for name in INDEX_FIELDS},
            "steps": [dict(step_values(step)) for step in self.steps],
            "sample_denoms": self.sample_denoms.tolist(),
            "carried": self.carried,
            "dropped": self.dropped,
            "oversize": self.oversize,
        }
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: The text is not such JSON, or of another format version.
        """
        try:
            values = parse_json(text)
            if values["version"] != FORMAT_VERSION:
                raise PlanError(
                    f"plan: format version {values['version']!r}, this package reads "
                    f"{FORMAT_VERSION}; plan the batch again"
                )
            return cls(**_fields_from_json(values))
        except PlanError:
            raise
        except NOT_A_PLAN as error:
            raise PlanError(f"plan: not the JSON of a plan ({error!r})") from error

    def to_schedule(self) -> Schedule:
        """The list form, as `build_dp_schedule` returns it."""
        return plan_to_schedule(self)

    @classmethod
    def from_schedule(
        cls, schedule: Schedule, index: SampleIndex, layout: ParallelLayout, options: PlanOptions
    ) -> Plan:
        """The plan that a list form describes, checked.

        Args:
            schedule: The list form; samples in no partition are carried under `leftover="carry"`
                (oversize ones never), else dropped.
            index: Lengths, mask sums and ids of all samples.
            layout: The parallel layout; dp must be the number of partitions.
            options: The options of the plan.

        Raises:
            PlanError: The lists do not fit together, or the plan breaks a guarantee.
        """
        plan = cls(**vars(data_from_schedule(schedule, index, layout, options)))
        plan.check()
        return plan


def step_values(step: StepPlan) -> dict[str, Any]:
    """The fields of a step, by name."""
    return {
        "micro_batches": step.micro_batches,
        "step_global_batch_size": step.step_global_batch_size,
        "loss_denominator": step.loss_denominator,
        "num_trained_tokens": step.num_trained_tokens,
    }


def _fields_from_json(values: dict[str, Any]) -> dict[str, Any]:
    options = PlanOptions.from_dict(values["options"])
    denom_type = np.float64 if options.loss_reduction == "constant" else np.int64
    steps = tuple(_step_from_json(step) for step in values["steps"])
    index = SampleIndex(**{name: np.array(_ints(values["index"][name])) for name in INDEX_FIELDS})
    index.check("its index")
    denominators = values["sample_denoms"]
    if denom_type is np.int64:
        _ints(denominators)
    return {
        "layout": ParallelLayout(**values["layout"]),
        "options": options,
        "index": index,
        "steps": steps,
        "sample_denoms": np.array(denominators, dtype=denom_type),
        **{name: tuple(_ints(values[name])) for name in ("carried", "dropped", "oversize")},
    }


def _step_from_json(step: dict[str, Any]) -> StepPlan:
    counts = ("step_global_batch_size", "loss_denominator", "num_trained_tokens")
    _ints([step[name] for name in counts])
    return StepPlan(
        micro_batches=tuple(
            tuple(tuple(_ints(rows)) for rows in rank) for rank in step["micro_batches"]
        ),
        **{name: step[name] for name in counts},
    )


def _ints(values: Any) -> list[int]:
    """`values`, if they are integers of 64 bits; NumPy would cut 1.5 to 1."""
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise ValueError(f"{short(values)} is no list of integers")
    if values and not -(1 << 63) <= min(values) <= max(values) < 1 << 63:
        raise ValueError("an integer does not fit in 64 bits")
    return values

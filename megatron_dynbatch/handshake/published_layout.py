"""The trainer's parallel layout and plan options, as a note on the transport."""

from __future__ import annotations

import json

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.types import NOT_A_PLAN
from megatron_dynbatch.rollouts import RolloutSource
from megatron_dynbatch.rollouts.strict_json import parse_json

LAYOUT_NOTE = "layout"


def publish_layout(source: RolloutSource, layout: ParallelLayout, options: PlanOptions) -> None:
    """Leaves layout and options on the transport; a later call replaces them."""
    values = {"layout": layout.to_dict(), "options": options.to_dict()}
    source.publish(LAYOUT_NOTE, json.dumps(values, sort_keys=True))


def read_layout(source: RolloutSource) -> tuple[ParallelLayout, PlanOptions] | None:
    """What the trainer published last, or None.

    Raises:
        PlanError: The note is not from this version of the package.
    """
    text = source.published(LAYOUT_NOTE)
    if text is None:
        return None
    try:
        values = parse_json(text)
        layout, options = values["layout"], values["options"]
        return ParallelLayout(**layout), PlanOptions.from_dict(options)
    except NOT_A_PLAN as error:
        raise PlanError(
            f"{source}: the trainer's published layout cannot be read ({error!r}); use the same "
            "version of megatron_dynbatch on both sides"
        ) from error

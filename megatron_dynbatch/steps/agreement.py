"""What ranks compare before they train a batch: few and short values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megatron_dynbatch._version import __version__
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.steps.announce import Staleness
from megatron_dynbatch.steps.cursor import Cursor
from megatron_dynbatch.steps.loaded_batch import LoadedBatch


def setting_facts(
    options: PlanOptions, layout: ParallelLayout, staleness: Staleness
) -> dict[str, str]:
    """Field → value of what must be equal on all ranks, whatever the batch."""
    return {
        "package version": __version__,
        **_named("option", options.to_dict()),
        **_named("layout", layout.to_dict()),
        **_named("staleness", asdict(staleness)),
    }


def batch_facts(
    batch: LoadedBatch, cursor: Cursor, dp_rank: int
) -> tuple[dict[str, str], dict[str, str]]:
    """What must be equal before a batch is trained: on all ranks, and on those of a DP rank."""
    facts = {
        **_named("cursor", cursor.to_dict()),
        "plan": batch.fingerprint,
        "rollout files": ", ".join(batch.stamps),
    }
    return facts, {f"{name} of DP rank {dp_rank}": d for name, d in batch.digests.items()}


def _named(kind: str, values: Mapping[str, Any]) -> dict[str, str]:
    return {f"{kind} {name}": str(value) for name, value in values.items()}

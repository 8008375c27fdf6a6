"""Training tells the rollout side how far it is and where its weights are.

So generation runs ahead of training only as far as the user allows.
"""

from __future__ import annotations

import json
import re
import time

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.source import RolloutSource
from megatron_dynbatch.rollouts.strict_json import parse_json
from megatron_dynbatch.wording import short

PROGRESS_NOTE = "progress"
WEIGHTS_NOTE = "weights"
_POLL_SECONDS = 0.05


class NoRoom(DynbatchError, TimeoutError):
    """Training did not get far enough in time."""


def publish_progress(source: RolloutSource, batch_id: int) -> None:
    """Says that training has come to a batch: all before it are trained."""
    source.publish(PROGRESS_NOTE, str(batch_id))


def training_batch(source: RolloutSource) -> int:
    """The batch that is trained now, or is the next to be; 0 before training began.

    Raises:
        RolloutDataError: The note is no number.
    """
    text = source.published(PROGRESS_NOTE)
    if text is None:
        return 0
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*", text):
        raise RolloutDataError(f"{source}: progress note {short(text)} is no batch number")
    return int(text)


def wait_for_room(
    source: RolloutSource, batch_id: int, max_ahead: int, *, timeout: float = 3600.0
) -> None:
    """Back-pressure: returns when training has come to within `max_ahead` batches of `batch_id`.

    Call it before generating batch `batch_id`. With weights of policy version v ≥ the training
    batch at this moment, the batch is at most `max_ahead` batches stale when it is trained.

    Args:
        source: Where batches go.
        batch_id: The batch to generate.
        max_ahead: 0: only when the batch is the next to be trained.
        timeout: Seconds.

    Raises:
        NoRoom: Training did not get there in time.
    """
    deadline = time.monotonic() + timeout
    while (now := training_batch(source)) < batch_id - max_ahead:
        if time.monotonic() > deadline:
            raise NoRoom(
                f"training in {source} stands at batch {now}; batch {batch_id} may be generated "
                f"only when it has come to batch {batch_id - max_ahead}, which it did not within "
                f"{timeout:.0f} s: look at the trainer"
            )
        time.sleep(_POLL_SECONDS)


def publish_weights(source: RolloutSource, version: int, where: str) -> None:
    """Says that weights are to be had.

    Args:
        source: The transport.
        version: How many batches they were trained on.
        where: A checkpoint directory, a file, or whatever else the generator understands.
    """
    source.publish(WEIGHTS_NOTE, json.dumps({"version": version, "where": where}))


def published_weights(source: RolloutSource) -> tuple[int, str] | None:
    """Version and place of the newest weights, or None.

    Raises:
        RolloutDataError: The note is from something else.
    """
    text = source.published(WEIGHTS_NOTE)
    if text is None:
        return None
    try:
        values = parse_json(text)
        version, where = values["version"], values["where"]
        if type(version) is not int or not 0 <= version < 1 << 63 or not isinstance(where, str):
            raise ValueError("no version and place")
        return version, where
    except (ValueError, KeyError, TypeError) as error:
        raise RolloutDataError(f"{source}: weights note {short(text)} cannot be read") from error


def wait_for_weights(
    source: RolloutSource, at_least: int, *, timeout: float = 3600.0
) -> tuple[int, str]:
    """Back-pressure by age: returns when weights of a version ≥ `at_least` are there.

    Before generating batch b with `at_least` = b − limit, it keeps the batch within the limit.

    Raises:
        NoRoom: They did not come in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = published_weights(source)
        if found is not None and found[0] >= at_least:
            return found
        if time.monotonic() > deadline:
            there = "none" if found is None else f"version {found[0]}"
            raise NoRoom(
                f"weights of version {at_least} or newer were not published in {source} within "
                f"{timeout:.0f} s ({there} there): look at the trainer"
            )
        time.sleep(_POLL_SECONDS)

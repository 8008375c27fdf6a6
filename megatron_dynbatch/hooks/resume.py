"""Before the first step: are the batches there that the cursor needs, and if not, what would do?"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.hooks.options import TrainingOptions
from megatron_dynbatch.hooks.tracker import completed_iteration
from megatron_dynbatch.rollouts import RolloutSource
from megatron_dynbatch.steps import Cursor, StepFeed
from megatron_dynbatch.steps.retention import missing_batches

_ITERATION = re.compile(r"iter_(\d{7,})")
_MOST_LISTED = 8


def check_batches(feed: StepFeed, options: TrainingOptions) -> None:
    """Return if no batch that training needs was deleted; every rank must call it.

    Raises:
        ResumeError: On every rank: lists the deleted ones, and the oldest checkpoint that would do.
        RankFailure: Rank 0 cannot look.
    """

    def problem() -> str | None:
        missing = missing_batches(feed.source, feed.cursor)
        return _problem(feed, options, missing) if missing else None

    # The checkpoints are read only on the way to the error.
    patience = feed.config.batch_timeout + feed.exchange.timeout
    found = feed.exchange.broadcast(problem, "rank 0 to look for the batches to train", patience)
    if found is not None:
        raise ResumeError(found)


def _problem(feed: StepFeed, options: TrainingOptions, missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:_MOST_LISTED]))
    if len(missing) > _MOST_LISTED:
        shown += f" and {len(missing) - _MOST_LISTED} more up to {missing[-1]}"
    were = "batch {} was" if len(missing) == 1 else "batches {} were"
    return (
        f"training would go on at rollout batch {feed.cursor.batch_id} of {feed.source}, but "
        f"{were.format(shown)} deleted (--keep-batches); {_advice(feed.source, options)}"
    )


def _advice(source: RolloutSource, options: TrainingOptions) -> str:
    folders = [path for path in dict.fromkeys((options.load, options.save)) if path is not None]
    usable = [
        (iteration, folder)
        for folder in folders
        if (iteration := _oldest_usable(source, folder)) is not None
    ]
    if not usable:
        places = " or ".join(map(str, folders)) or "--load or --save"
        return (
            f"the oldest checkpoint that would do: none in {places}; begin with rollouts that "
            "are all there"
        )
    iteration, folder = min(usable)
    return (
        f"the oldest checkpoint that would do: iteration {iteration} in {folder} (--load {folder} "
        f"--ckpt-step {iteration})"
    )


def _oldest_usable(source: RolloutSource, folder: Path) -> int | None:
    """The first completed iteration whose batches are there."""
    if not folder.is_dir():
        return None
    names = (_ITERATION.fullmatch(path.name) for path in folder.iterdir())
    completed = completed_iteration(folder)
    for iteration in sorted(int(match[1]) for match in names if match):
        if iteration > completed:  # begun, and never finished
            return None
        cursor = saved_cursor(folder / f"iter_{iteration:07d}")
        if cursor is not None and not missing_batches(source, cursor):
            return iteration
    return None


def saved_cursor(checkpoint: Path) -> Cursor | None:
    """The cursor in a checkpoint of format torch or torch_dist; None if none can be read."""
    try:
        arguments = _saved_arguments(checkpoint)
        return Cursor.from_dict(arguments.dynbatch_cursor)
    except Exception:  # of another program, damaged, or of another format: it will not do
        return None


def _saved_arguments(checkpoint: Path) -> Any:
    legacy = sorted(checkpoint.glob("mp_rank_*/model_optim_rng.pt"))
    if legacy:
        return torch.load(legacy[0], map_location="cpu", mmap=True, weights_only=True)["args"]
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load_common_state_dict(str(checkpoint))["args"]

"""The file in which Megatron names its last completed checkpoint.

Megatron empties it before it writes the number. A process that is killed in between, or a full
disk, leaves it empty, and from then on every start ends in exit code 0 without a step ("ERROR:
Invalid metadata file", `read_metadata` in megatron/training/checkpointing.py, 0.17 to 0.19). Since
it is written last, the newest checkpoint of the folder is then complete, and is named again here.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.output import progress
from megatron_dynbatch.rollouts.files import replace_text

TRACKER = "latest_checkpointed_iteration.txt"

_ITERATION = re.compile(r"iter_(\d{7,})")
# What a checkpoint has once it is complete: torch_dist and the other sharded formats; torch.
_SIGNS = ("metadata.json", "mp_rank_*/model_optim_rng.pt")


def completed_iteration(folder: Path) -> int:
    """Iteration of the last completed checkpoint in a folder; −1 if it names none."""
    try:
        text = (folder / TRACKER).read_bytes().strip()
    except OSError:  # also where a shared file system is slow to show it
        return -1
    return int(text) if text.isdigit() else -1


def mend_tracker(folder: Path) -> None:
    """Name the newest checkpoint where the file is empty; every rank does the same.

    Raises:
        ResumeError: It is empty and no complete checkpoint is there.
    """
    path = folder / TRACKER
    try:
        if path.read_bytes().strip():
            return
    except FileNotFoundError:
        return
    complete = [
        int(match[1])
        for place in folder.iterdir()
        if (match := _ITERATION.fullmatch(place.name)) and any(map(any, map(place.glob, _SIGNS)))
    ]
    if not complete:
        raise ResumeError(
            f"{path} is empty, as after a kill while it was written, and no complete checkpoint is "
            "beside it; remove it to start from the beginning, or give another --load"
        )
    replace_text(path, str(max(complete)), "tracker-mend")
    progress(f"{path} was empty, as after a kill; it names iteration {max(complete)} again")

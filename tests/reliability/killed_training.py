"""A training that ends itself at a chosen place, once for each time that torchrun starts it.

    KILLED_AT=FOLDER PLACE…   (in the environment; places as of `failpoints`, one for each attempt)
    torchrun --max-restarts N tests/reliability/killed_training.py [arguments of the script …]

The first attempt is armed with the first place that did not act yet, and so on; when all did, with
none. Besides the package's own durable writes there are places in Megatron's: see `MEGATRONS`.
FOLDER/killed-k is made when place k acts.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_dynbatch import failpoints
from megatron_dynbatch.failpoints import CONTENT, ENTRY, Failpoint
from tests.parity.job import OWN_SCRIPT

MEGATRONS = {
    "checkpoint": ENTRY,  # all files of one; --async-save: after it is handed to the writer
    "tracker": CONTENT,  # the file that names the last completed checkpoint; middle: it is empty
    "read": ENTRY,  # rows of a batch
    "forward": ENTRY,
    "optimizer step": ENTRY,  # after: weights are changed, no counter is
    "hand-over": ENTRY,  # ranks compare a batch
}


SECONDS = 400
"""More than any attempt takes."""


def place_of_attempt() -> Failpoint | None:
    """What this attempt is armed with."""
    folder, *places = os.environ["KILLED_AT"].split(" ")
    marks = [os.path.join(folder, f"killed-{k}") for k in range(len(places))]
    left = [k for k, mark in enumerate(marks) if not os.path.exists(mark)]
    if not left:
        return None
    failpoints.WRITES = {**failpoints.WRITES, **MEGATRONS}
    return Failpoint.parse(places[left[0]].replace("_", " "), marks[left[0]])


def _around(owner: Any, attribute: str, name: str) -> None:
    function = getattr(owner, attribute)

    @functools.wraps(function)
    def reached(*args: Any, **kwargs: Any) -> Any:
        failpoints.reached(name, "before")
        result = function(*args, **kwargs)
        failpoints.reached(name, "after")
        return result

    setattr(owner, attribute, reached)


@contextmanager
def _tracker(open_file: Callable[..., Any], path: str, mode: str) -> Iterator[Any]:
    failpoints.reached("tracker", "before")
    with open_file(path, mode) as file:
        failpoints.reached("tracker", "middle")
        yield file
    failpoints.reached("tracker", "after")


class _Storage:
    """Megatron's way to files, with places at the tracker."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "w" and str(path).endswith("latest_checkpointed_iteration.txt"):
            return _tracker(self._storage.open, path, mode)
        return self._storage.open(path, mode, *args, **kwargs)


def set_places() -> None:
    """Put the places of `MEGATRONS` into this process."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.training import checkpointing

    from megatron_dynbatch.rollouts import RolloutDirectory
    from megatron_dynbatch.steps import Exchange

    _around(checkpointing.dist_checkpointing, "save", "checkpoint")
    checkpointing.maybe_msc = _Storage(checkpointing.maybe_msc)
    _around(RolloutDirectory, "read", "read")
    _around(GPTModel, "forward", "forward")
    for optimizer in (torch.optim.AdamW, torch.optim.Adam):
        _around(optimizer, "step", "optimizer step")
    _around(Exchange, "compare", "hand-over")


def main() -> None:
    """See the module."""
    from megatron_dynbatch.run import Launch, prepare, run_target

    faulthandler.dump_traceback_later(SECONDS)  # a hang says where
    failpoints.arm(place_of_attempt())
    prepare(cpu=True)
    set_places()
    run_target(Launch(str(OWN_SCRIPT), False, tuple(sys.argv[1:]), cpu=True))


if __name__ == "__main__":
    main()

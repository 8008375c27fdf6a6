"""One training of the real Megatron in this process, watched where Megatron itself can see it.

What `tests.cpu.training` and `tests.parity.job` run is started and watched here; they differ in
what they make of a training: numbers of a tiny stock run, or all that a reference is compared with.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.pool import ROOT

type OnTraining = Callable[[list[Any], Any], Any]
"""Called with the model chunks and the optimizer."""


def launch(script: Path | str, argv: Sequence[str]) -> None:
    """Run a script as ``python -m megatron_dynbatch.run --cpu`` does, without installing hooks."""
    from megatron_dynbatch.run import Launch, run_target

    # The launcher replaces the first entry by the script's folder.
    if str(ROOT) not in sys.path[1:]:
        sys.path.append(str(ROOT))
    run_target(Launch(str(script), False, tuple(argv), cpu=True))


@contextlib.contextmanager
def watching(
    *,
    before: OnTraining | None = None,
    after: OnTraining | None = None,
    logged: Callable[[Mapping[str, Any]], Any] | None = None,
) -> Iterator[None]:
    """Stand around Megatron's training loop and its log.

    Args:
        before: Called before the first iteration.
        after: Called after the last one.
        logged: Called with each iteration's arguments of `training_log`, by name.
    """
    from megatron.training import training

    train_loop, log = training.train, training.training_log

    @functools.wraps(train_loop)
    def train(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(train_loop).bind(*args, **kwargs).arguments
        if before is not None:
            before(given["model"], given["optimizer"])
        answer = train_loop(*args, **kwargs)
        if after is not None:
            after(given["model"], given["optimizer"])
        return answer

    @functools.wraps(log)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        if logged is not None:
            logged(inspect.signature(log).bind(*args, **kwargs).arguments)
        return log(*args, **kwargs)

    training.train, training.training_log = train, training_log
    try:
        yield
    finally:
        training.train, training.training_log = train_loop, log


def row_of(given: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of one logged iteration: iteration, learning_rate, grad_norm, consumed, losses."""
    from megatron.training import get_args

    row = {
        "iteration": given["iteration"],
        "learning_rate": given["learning_rate"],
        # None without clipping, and for a step that overflowed in fp16.
        "grad_norm": math.nan if given["grad_norm"] is None else float(given["grad_norm"]),
        "consumed": get_args().consumed_train_samples,
    }
    row.update({name: float(value) for name, value in given["loss_dict"].items()})
    return row

"""NaN and infinity in the loss, traced to sample, rollout and rank.

What is done about them follows Megatron's flags: with --check-for-nan-in-loss-and-grad and
--rerun-mode disabled the run stops; else one line is printed, and Megatron's own checks run the
step again or (fp16) skip it. Looking costs one transfer per step, after the last forward pass; the
search through tokens happens only when something was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

import torch

from megatron_dynbatch.errors import NonFiniteLossError
from megatron_dynbatch.hooks.session import Session
from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.output import progress
from megatron_dynbatch.report.metric import on_host
from megatron_dynbatch.steps.step import Step

_MOST_SAMPLES = 4


@contextmanager
def naming_non_finite(run: Session) -> Iterator[None]:
    """Context of a step's forward and backward passes on this rank.

    Raises:
        NonFiniteLossError: The loss of this rank is not finite, and Megatron's check of it raised
            or would raise; it is told to the other ranks.
    """
    run.loss_sums.clear()
    try:
        yield
    except Exception as error:
        found = non_finite(run)
        if found is None:
            raise
        raise _told(run, found) from error
    else:
        found = non_finite(run)
        if found is not None and run.options.stops_at_non_finite:
            raise _told(run, found)
        if found is not None:
            progress(found)
    finally:
        run.loss_sums.clear()


def _told(run: Session, found: str) -> NonFiniteLossError:
    error = NonFiniteLossError(found)
    run.feed.exchange.fail(error)
    return error


def non_finite(run: Session) -> str | None:
    """Which samples of this rank made the loss of the open step NaN or infinite, if any did."""
    assert run.step is not None
    micro_batches = _suspects(run)
    if not micro_batches:
        return None
    found = [line for mb in micro_batches for line in _samples(run.step, mb)]
    if not found:
        rows = [row for mb in micro_batches for row in mb.sample_rows]
        found = [f"one of {run.step.sample_name(row)}" for row in rows]
    shown = "; ".join(found[:_MOST_SAMPLES])
    more = f"; and {len(found) - _MOST_SAMPLES} more" if len(found) > _MOST_SAMPLES else ""
    rank = torch.distributed.get_rank()
    return (
        f"rank {rank} (DP rank {run.step.dp_rank}): the loss of step {run.step.step_index} is not "
        f"finite: {shown}{more}; look at log-probs and rewards of these samples, at the learning "
        "rate, or drop them"
    )


def _suspects(run: Session) -> list[MicroBatch]:
    """Micro-batches whose loss is not finite, or whose loss was not returned."""
    if run.loss_sums:
        sums = on_host([value for _, value in run.loss_sums])
        found = [mb for (mb, _), v in zip(run.loss_sums, sums, strict=True) if not isfinite(v)]
        if found:
            return found
    # Megatron's check inside a loss function raises before the function returns.
    open_one = run.current
    if open_one is None or any(mb is open_one for mb, _ in run.loss_sums):
        return []
    return [open_one] if list(_samples(run.step, open_one)) else []


def _samples(step: Step | None, micro_batch: MicroBatch) -> Iterator[str]:
    """One line for each value at a trained token of a sample that is not finite."""
    assert step is not None
    if not micro_batch.summed or micro_batch.is_dummy:
        return
    looked_at = {**micro_batch.columns, **micro_batch.summed}
    trained = micro_batch.token_weights != 0
    places, positions = micro_batch.sample_positions()
    for name, values in looked_at.items():
        values = values.reshape(-1)
        wrong = torch.nonzero(trained & ~values.isfinite()).reshape(-1).tolist()
        first: dict[int, int] = {}
        for token in wrong:
            first.setdefault(int(places[token]), token)
        for place, token in first.items():
            row = micro_batch.sample_rows[place]
            yield (
                f"{name} is {values[token].item()} at the prediction of token "
                f"{positions[token] + 1} of {step.sample_name(row)}"
            )

"""The control: the same rollouts forced into steps of a fixed number of samples.

That is what one does without the plugin: `--global-batch-size` samples per step, and what does not
fit is dropped, or filled up with samples that have no loss. Nothing is trained here; the numbers
follow from the sizes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_dynbatch.plan import compute_dynamic_global_batch_size
from megatron_dynbatch.rollouts import RolloutDirectory, SampleIndex


def fixed_batch_control(
    batches: Iterable[SampleIndex], rows: Sequence[Mapping[str, Any]], dp_size: int
) -> dict[str, Any]:
    """What a fixed global batch makes of the batches.

    Args:
        batches: Of rollouts, as they were trained.
        rows: The steps that trained them (`results.step_rows`).
        dp_size: Data-parallel size; the fixed size is a multiple of it.

    Returns:
        fixed_size: samples per step, the median of the real steps; then, if the rest of each batch
        is dropped: dropped_samples, samples, torn_rollouts (samples partly dropped or in two
        steps), rollouts; and if it is filled up: padded_samples, smallest_scale (factor on the loss
        and gradient of the emptiest step), mean_scale; and steps, actual_steps: learning-rate
        schedules that count iterations advance by the former.
    """
    size = compute_dynamic_global_batch_size(int(np.median([r["samples"] for r in rows])), dp_size)
    total = dropped = torn = rollouts = padded = num_steps = 0
    scales: list[float] = []
    for index in batches:
        count = len(index)
        total += count
        rollouts += index.num_rollouts
        # The rows of the rest belong to a step of their own that is not trained.
        step_of_row = np.arange(count) // size
        torn += _num_torn(index, step_of_row, whole_steps=count // size)
        dropped += count % size
        num_steps += count // size
        padded += -count % size
        scales += [1.0] * (count // size) + ([count % size / size] if count % size else [])
    return {
        "fixed_size": size,
        "samples": total,
        "dropped_samples": dropped,
        "rollouts": rollouts,
        "torn_rollouts": torn,
        "padded_samples": padded,
        "smallest_scale": min(scales),
        "mean_scale": float(np.mean(scales)),
        "steps": num_steps,
        "actual_steps": len(rows),
    }


def whole_batches(
    directory: RolloutDirectory, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[SampleIndex], list[Mapping[str, Any]]]:
    """The batches of which every sample was trained, and the steps that did.

    The last one may be left out; if a run ends inside its first batch, that one is taken.

    Args:
        directory: Holds the batches.
        rows: All steps (`results.step_rows`).
    """
    by_batch: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_batch.setdefault(row["batch_id"], []).append(row)
    indices = {batch_id: directory.index(batch_id) for batch_id in by_batch}
    trained = {b: sum(row["samples"] for row in own) for b, own in by_batch.items()}
    whole = [b for b in by_batch if trained[b] == len(indices[b])] or list(by_batch)
    return [indices[b] for b in whole], [row for b in whole for row in by_batch[b]]


def _num_torn(index: SampleIndex, step_of_row: np.ndarray, whole_steps: int) -> int:
    """Rollouts with samples in more than one step, or in a step that is not trained."""
    torn = 0
    for rollout in range(index.num_rollouts):
        steps = np.unique(step_of_row[index.rollout_indices == rollout])
        torn += int(len(steps) > 1 or steps[-1] >= whole_steps)
    return torn


def control_lines(control: Mapping[str, Any]) -> list[str]:
    """Three lines of numbers."""
    c = control
    return [
        f"fixed at {c['fixed_size']} samples, rest dropped: {c['dropped_samples']:,} of "
        f"{c['samples']:,} samples ({c['dropped_samples'] / c['samples']:.0%}) never train, and "
        f"{c['torn_rollouts']:,} of {c['rollouts']:,} rollouts lose samples or are torn in two",
        f"fixed, rest filled up: {c['padded_samples']:,} samples without a loss are computed, and "
        f"the loss of the emptiest step is scaled by {c['smallest_scale']:.2f}",
        f"fixed, learning rate: the schedule has advanced {c['steps']} steps instead of "
        f"{c['actual_steps']}, and counts {c['steps'] * c['fixed_size']:,} samples where "
        f"{c['rollouts']:,} rollouts were made",
    ]

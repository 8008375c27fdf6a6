"""Which rollouts make which step.

A splitter is a function `(index, options) -> steps`, each step a sequence of dense rollout
indices (`index.rollout_indices`). Rollouts that it leaves out are left over: allowed under the
policies `carry` and `drop` only. `split_steps` runs one and validates what it answers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.rollouts.index import SampleIndex

Splitter = Callable[[SampleIndex, PlanOptions], Sequence[Sequence[int]]]


def split_steps(index: SampleIndex, options: PlanOptions) -> list[NDArray[np.int64]]:
    """Rollouts of each step, in step order, as dense rollout indices.

    Raises:
        PlanError: The splitter is unknown, or a step is empty, doubles a rollout, names one out
            of range, cuts a prompt group under the `group` reduction, or leaves a rollout out
            although nothing may be left over.
    """
    steps = [
        np.asarray(step, dtype=np.int64)
        for step in find_splitter(options.step_splitter)(index, options)
    ]
    _validate(steps, index, options)
    return steps


def find_splitter(name: str) -> Splitter:
    """A built-in splitter by name, or any function by `package.module:function`."""
    if name in SPLITTERS:
        return SPLITTERS[name]
    module_name, _, attribute = name.partition(":")
    if not attribute:
        known = ", ".join(SPLITTERS)
        raise PlanError(
            f"step splitter {name!r} is unknown: use one of {known}, or package.module:function"
        )
    try:
        splitter = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"step splitter {name!r} cannot be imported: {error}") from error
    if not callable(splitter):
        raise PlanError(f"step splitter {name!r} is not callable")
    return splitter


def by_rollouts(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    """`rollouts_per_step` rollouts each, in order; whole prompt groups under `group`."""
    units = _whole_groups(index) if options.loss_reduction == "group" else None
    return _by_count(units, index, options)


def by_groups(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    """Whole prompt groups, at most `rollouts_per_step` rollouts in a step, in order."""
    return _by_count(_whole_groups(index), index, options)


def by_even(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    """As few steps as `rollouts_per_step` allows, of sizes as even as can be, larger first."""
    units = _whole_groups(index) if options.loss_reduction == "group" else None
    sizes = _unit_sizes(units, index, options)
    return _expand(_fill_even(sizes, options.rollouts_per_step), units)


def by_tokens(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    """Whole rollouts up to `tokens_per_step` tokens; a longer rollout is a step of its own."""
    if options.tokens_per_step is None:
        raise PlanError("step splitter 'tokens' needs tokens_per_step")
    tokens = np.zeros(index.num_rollouts, dtype=np.int64)
    np.add.at(tokens, index.rollout_indices, index.total_lengths)
    units = _whole_groups(index) if options.loss_reduction == "group" else None
    sizes = (
        tokens.tolist()
        if units is None
        else [int(tokens[np.asarray(unit, dtype=np.int64)].sum()) for unit in units]
    )
    steps = _fill(sizes, options.tokens_per_step)
    if options.leftover in ("carry", "drop") and steps:
        if sum(sizes[unit] for unit in steps[-1]) < options.tokens_per_step:
            steps.pop()
    return _expand(steps, units)


SPLITTERS: dict[str, Splitter] = {
    "rollouts": by_rollouts,
    "groups": by_groups,
    "even": by_even,
    "tokens": by_tokens,
}


def _by_count(
    units: list[list[int]] | None, index: SampleIndex, options: PlanOptions
) -> list[list[int]]:
    """Steps of at most `rollouts_per_step` rollouts made of whole units, by leftover policy."""
    sizes = _unit_sizes(units, index, options)
    limit = options.rollouts_per_step
    if options.leftover == "even":
        return _expand(_fill_even(sizes, limit), units)
    steps = _fill(sizes, limit)
    if limit is not None and options.leftover in ("carry", "drop"):
        if steps and sum(sizes[unit] for unit in steps[-1]) < limit:
            steps.pop()
    return _expand(steps, units)


def _unit_sizes(
    units: list[list[int]] | None, index: SampleIndex, options: PlanOptions
) -> list[int]:
    """Rollouts in each unit; a prompt group larger than a step is an error naming it."""
    if units is None:
        return [1] * index.num_rollouts
    limit = options.rollouts_per_step
    for unit in units:
        if limit is not None and len(unit) > limit:
            row = int(np.flatnonzero(index.rollout_indices == unit[0])[0])
            raise PlanError(
                f"prompt group {int(index.group_ids[row])} (first sample {row}) has {len(unit)} "
                f"rollouts and would be cut: --rollouts-per-step {limit} must hold it whole"
            )
    return [len(unit) for unit in units]


def _whole_groups(index: SampleIndex) -> list[list[int]]:
    """Rollouts of each prompt group, groups in order of first appearance."""
    groups: list[list[int]] = [[] for _ in range(index.num_groups)]
    _, first_rows = np.unique(index.rollout_indices, return_index=True)
    for rollout, group in enumerate(index.group_indices[first_rows].tolist()):
        groups[group].append(rollout)
    return groups


def _fill(sizes: Sequence[int], limit: int | None) -> list[list[int]]:
    """Consecutive units, each step filled while its size stays within `limit`."""
    if limit is None:
        return [list(range(len(sizes)))]
    steps: list[list[int]] = []
    filled = 0
    for unit, size in enumerate(sizes):
        if not steps or filled + size > limit:
            steps.append([])
            filled = 0
        steps[-1].append(unit)
        filled += size
    return steps


def _fill_even(sizes: Sequence[int], limit: int | None) -> list[list[int]]:
    """As many steps as `_fill` makes, with even sizes; units of size 1 differ by at most 1."""
    steps = _fill(sizes, limit)
    if limit is None or len(steps) < 2:
        return steps
    even: list[list[int]] = []
    unit, remaining = 0, sum(sizes)
    for steps_left in range(len(steps), 0, -1):
        target = -(-remaining // steps_left)
        step, filled = [unit], sizes[unit]
        unit += 1
        # Every later step must still find a unit.
        while unit <= len(sizes) - steps_left and filled + sizes[unit] <= target:
            step.append(unit)
            filled += sizes[unit]
            unit += 1
        even.append(step)
        remaining -= filled
    even[-1].extend(range(unit, len(sizes)))
    fits = all(sum(sizes[unit] for unit in step) <= limit for step in even)
    return even if fits else steps


def _expand(steps: list[list[int]], units: list[list[int]] | None) -> list[list[int]]:
    if units is None:
        return steps
    return [[rollout for unit in step for rollout in units[unit]] for step in steps]


def _validate(steps: list[NDArray[np.int64]], index: SampleIndex, options: PlanOptions) -> None:
    name = options.step_splitter
    step_of_rollout = np.full(index.num_rollouts, -1, dtype=np.int64)
    for number, step in enumerate(steps):
        if step.ndim != 1 or step.size == 0:
            raise PlanError(f"step splitter {name!r}: step {number} is empty or not a flat list")
        bad = step[(step < 0) | (step >= index.num_rollouts)]
        if bad.size:
            raise PlanError(
                f"step splitter {name!r}: step {number} names rollout {int(bad[0])}, but the "
                f"batch has rollouts 0 to {index.num_rollouts - 1}"
            )
        counts = np.bincount(step, minlength=index.num_rollouts)
        doubled = step[(counts[step] > 1) | (step_of_rollout[step] >= 0)]
        if doubled.size:
            raise PlanError(
                f"step splitter {name!r}: rollout {int(doubled.min())} appears a second time in "
                f"step {number}"
            )
        step_of_rollout[step] = number
    left_over = np.flatnonzero(step_of_rollout < 0)
    if left_over.size and options.leftover not in ("carry", "drop"):
        raise PlanError(
            f"step splitter {name!r}: rollout {int(left_over[0])} is in no step; only "
            f"--leftover carry and drop may leave one out, not {options.leftover!r}"
        )
    if options.loss_reduction == "group":
        _validate_groups(step_of_rollout, index, name)


def _validate_groups(step_of_rollout: NDArray[np.int64], index: SampleIndex, name: str) -> None:
    step_of_sample = step_of_rollout[index.rollout_indices]
    first = np.full(index.num_groups, -2, dtype=np.int64)
    first[index.group_indices[::-1]] = step_of_sample[::-1]
    cut = np.flatnonzero(first[index.group_indices] != step_of_sample)
    if cut.size:
        row = int(cut[0])
        raise PlanError(
            f"step splitter {name!r} cuts prompt group {int(index.group_ids[row])}: sample {row} "
            f"is in step {int(step_of_sample[row])}, the group's first sample in step "
            f"{int(first[index.group_indices[row]])}"
        )

"""What a training run left behind: step reports, rewards, and the rollouts it was made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.handshake import checked_plan, read_layout
from megatron_dynbatch.plan import Plan, make_plan
from megatron_dynbatch.report import StepReport
from megatron_dynbatch.report.identity import read_identity
from megatron_dynbatch.rollouts import RolloutDirectory

_REWARD_NAMES = ("rollout/reward", "reward")
_MARKER = "dynbatch.json"


@dataclass
class RunData:
    """A training run.

    Attributes:
        folder: Where it lies.
        reports: One per step, by iteration; of a step that ran again the later one.
        rewards: Batch → mean reward of its rollouts.
        rollouts: The rollout directory, if it is there.
        plans: Batch → its plan, or None; those that were asked for.
        identity: Command, layout, model and versions, see `report.identity`; empty if unknown.
    """

    folder: Path
    reports: list[StepReport]
    rewards: dict[int, float] = field(default_factory=dict)
    rollouts: RolloutDirectory | None = None
    plans: dict[int, Plan | None] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)


def read_run(folder: Path, steps: Path | None = None, rollouts: Path | None = None) -> RunData:
    """Read a run's folder.

    Args:
        folder: Holds the step reports (`--step-report`), and may hold the rollout directory and
            JSONL files with `batch_id` and `rollout/reward` (or `reward`) in each line.
        steps: The step reports, if they are elsewhere or there are several.
        rollouts: The rollout directory, likewise.

    Raises:
        ValueError: There are no step reports, or several; says which.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such directory")
    file = steps or _find_steps(folder)
    if not file.is_file():
        raise OptionError(f"--steps {file}: no such file")
    reports = _latest(_lines(file))
    if not reports:
        raise ValueError(f"{steps or folder}: no step has been reported yet")
    if rollouts is not None and not rollouts.is_dir():
        raise OptionError(f"--rollouts {rollouts}: there is no such directory")
    directory = RolloutDirectory(rollouts) if rollouts else _find_rollouts(folder, reports)
    run = RunData(folder, reports, _logged_rewards(folder), directory)
    run.identity = read_identity(file)
    if directory is not None and not run.rewards:
        run.rewards = _stored_rewards(directory, {report.batch_id for report in reports})
    return run


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSONL file; a last line that is still being written is left out."""
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _is_report(row: dict[str, Any]) -> bool:
    return {"iteration", "step_global_batch_size", "num_microbatches"} <= row.keys()


def _latest(rows: Iterator[dict[str, Any]]) -> list[StepReport]:
    reports = {row["iteration"]: StepReport(**row) for row in rows if _is_report(row)}
    return [reports[iteration] for iteration in sorted(reports)]


def _find_steps(folder: Path) -> Path:
    usual = folder / "steps.jsonl"
    if usual.is_file():
        return usual
    found = [path for path in sorted(folder.glob("*.jsonl")) if any(map(_is_report, _lines(path)))]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(
            f"{folder} holds no step reports; train with --step-report {folder}/steps.jsonl, or "
            "name the file with --steps"
        )
    raise ValueError(f"several files hold step reports: {', '.join(map(str, found))}; use --steps")


def _find_rollouts(folder: Path, reports: Sequence[StepReport]) -> RolloutDirectory | None:
    """The rollout directory whose batches have as many samples as the steps report."""
    sizes: dict[int, int] = {}
    for report in reports:
        sizes[report.batch_id] = sizes.get(report.batch_id, 0) + report.num_samples
    for marker in sorted([*folder.glob(_MARKER), *folder.glob(f"*/{_MARKER}")]):
        directory = RolloutDirectory(marker.parent)
        batches = [b for b in sizes if _is_present(directory, b)]
        if any(len(directory.index(b)) == sizes[b] for b in batches[:3]):
            return directory
    return None


def _is_present(directory: RolloutDirectory, batch_id: int) -> bool:
    try:
        return directory.state(batch_id) == "present"
    except ValueError:  # it was deleted after it had been trained
        return False


def _logged_rewards(folder: Path) -> dict[int, float]:
    rewards: dict[int, float] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in _lines(path):
            name = next((n for n in _REWARD_NAMES if isinstance(row.get(n), float | int)), None)
            if name is not None and isinstance(row.get("batch_id"), int):
                rewards[row["batch_id"]] = float(row[name])
    return rewards


def _stored_rewards(directory: RolloutDirectory, batches: set[int]) -> dict[int, float]:
    """Mean over rollouts of the rewards that samples carry; siblings count once."""
    rewards: dict[int, float] = {}
    for batch in sorted(b for b in batches if _is_present(directory, b)):
        index = directory.index(batch)
        first = np.unique(index.rollout_indices, return_index=True)[1].tolist()
        found = [s.reward for s in directory.read(batch, first, ("reward",))]
        scored = [reward for reward in found if reward is not None]
        if scored:
            rewards[batch] = float(np.mean(scored))
    return rewards


def plan_of_step(run: RunData, report: StepReport) -> Plan | None:
    """The plan that a step was part of; None where it cannot be made again.

    The plan that lies beside the batch, or the one that the trainer made from its published layout:
    planning is deterministic. Batches with samples carried over from the one before have neither.
    """
    if report.batch_id not in run.plans:
        run.plans[report.batch_id] = _plan_of_batch(run, report.batch_id)
    plan = run.plans[report.batch_id]
    if plan is None or report.step_index >= len(plan.steps):
        return None
    step = plan.steps[report.step_index]
    same = (step.num_samples, step.num_microbatches) == (
        report.num_samples, report.num_microbatches,
    )  # fmt: skip
    return plan if same else None


def _plan_of_batch(run: RunData, batch_id: int) -> Plan | None:
    directory = run.rollouts
    if directory is None or not _is_present(directory, batch_id):
        return None
    published = read_layout(directory)
    if published is None:
        return None
    index, text = directory.index(batch_id), directory.plan_json(batch_id)
    try:
        return checked_plan(text, index, *published) if text else make_plan(index, *published)
    except ValueError:
        return make_plan(index, *published)

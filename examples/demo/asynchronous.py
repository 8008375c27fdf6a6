"""``python -m examples.demo --async``: generation ahead of training against generation in turns.

Two trainings start from the same warm-up. In both a process of its own generates, and Megatron
trains in another one. In the first arm a rollout may be 0 batches old, so both take turns; in the
second one batch, so the next batch is generated while one trains. Batches and steps are made
equally long by sleeping, as long as those of a model that is worth the trouble.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.generation import Generation
from examples.demo.runs import MAX_TOKENS_PER_GPU, MODEL, NUM_HEADS, SeedRun
from examples.demo.training import TrainingFailed, read_json_lines, read_reports, train
from megatron_dynbatch import RolloutDirectory
from megatron_dynbatch.report import StepReport
from megatron_dynbatch.wording import counted

BAR = 0.65
"""What the wall time of the asynchronous arm may be, as a part of the synchronous one's."""


@dataclass(frozen=True)
class LedgerRow:
    """One batch: when it was generated and trained, and how old its rollouts were then.

    Attributes:
        batch_id: The batch.
        rollouts: Rollouts in it.
        trained_rollouts: Rollouts of its steps.
        oldest_version: Batches that the weights which sampled it had been trained on, the least.
        age: batch_id − oldest_version.
        reward: Mean over all its episodes.
        generated: Start and end, in seconds from the first generation of the arm.
        trained: Start and end.
        generation_work: Seconds of the generation that were no sleep.
    """

    batch_id: int
    rollouts: int
    trained_rollouts: int
    oldest_version: int
    age: int
    reward: float
    generated: tuple[float, float]
    trained: tuple[float, float]
    generation_work: float


@dataclass
class Arm:
    """One of the two trainings.

    Attributes:
        name: synchronous or asynchronous.
        limit: Largest age of a rollout, in batches.
        folder: Of its files.
        num_batches: Batches, each one step.
        least_seconds: What a batch takes to generate, and a step to train, at least.
        wall_seconds: From the start of both processes to the end of the training.
    """

    name: str
    limit: int
    folder: Path
    num_batches: int
    least_seconds: float
    wall_seconds: float = field(default=0.0, init=False)

    @property
    def rollouts(self) -> Path:
        """The rollout directory."""
        return self.folder / "rollouts"

    @property
    def steps_file(self) -> Path:
        """Step reports."""
        return self.folder / "steps.jsonl"

    def generation(self, seed: int, groups: int) -> Generation:
        """What generates its batches."""
        return Generation(
            str(self.rollouts), self.folder / "generation.jsonl", seed, self.num_batches, groups,
            self.limit, self.least_seconds, NUM_HEADS,
        )  # fmt: skip

    def launch(self, seed: int, warm_up: Path) -> list[str]:
        """The trainer's command line."""
        return [
            "--module", "examples.grpo_async_policy", *MODEL, "--seed", str(seed),
            "--load", str(warm_up), "--finetune",
            "--lr", "1e-3", "--lr-decay-style", "constant", "--train-samples", "1000000",
            "--adam-beta2", "0.99", "--clip-grad", "1.0",
            "--dynamic-global-batch", "--rollout-path", str(self.rollouts),
            "--rollouts-per-step", "batch", "--max-tokens-per-gpu", str(MAX_TOKENS_PER_GPU),
            "--micro-batch-width", "variable", "--max-staleness", str(self.limit),
            "--step-report", str(self.steps_file),
            "--weights-dir", str(self.folder / "weights"),
            "--boundary-log", str(self.folder / "boundaries.jsonl"),
            "--least-step-seconds", str(self.least_seconds),
        ]  # fmt: skip

    def run(self, seed: int, groups: int, warm_up: Path) -> None:
        """Generate and train.

        Raises:
            TrainingFailed: The generation or the training ended with an error.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        start = time.monotonic()
        generation = self.generation(seed, groups).start()

        def on_poll() -> None:
            if generation.exitcode:
                raise TrainingFailed("the generation ended with an error, see above")

        try:
            train(
                self.launch(seed, warm_up),
                self.steps_file,
                self.folder / "training.log",
                self._print_step,
                on_poll=on_poll,
                num_processes=1,
            )
        finally:
            self.wall_seconds = time.monotonic() - start
            generation.terminate()
            generation.join()

    def _print_step(self, report: StepReport) -> None:
        print(
            f"{self.name} step {report.iteration:>3}/{self.num_batches}  "
            f"{counted(report.step_global_batch_size, 'rollout'):>11}  "
            f"waited {report.wait_time or 0:.2f} s",
            flush=True,
        )

    def ledger(self) -> list[LedgerRow]:
        """A row per batch that was trained, in order."""
        trained: dict[int, int] = {}
        for report in read_reports(self.steps_file):
            size = report.step_global_batch_size
            trained[report.batch_id] = trained.get(report.batch_id, 0) + size
        boundaries = read_json_lines(self.folder / "boundaries.jsonl")
        begin, end = (
            {b["batch_id"]: b["time"] for b in reversed(boundaries) if b["event"] == event}
            for event in ("begin", "end")
        )
        directory = RolloutDirectory(self.rollouts)
        lines = read_json_lines(self.folder / "generation.jsonl")
        zero = lines[0]["start"]
        rows = []
        for line in lines:
            batch = line["batch_id"]
            if batch not in trained:
                continue
            index = directory.index(batch)
            oldest = int(index.policy_versions.min())
            rows.append(
                LedgerRow(
                    batch,
                    index.num_rollouts,
                    trained[batch],
                    oldest,
                    batch - oldest,
                    line["reward"],
                    (line["start"] - zero, line["end"] - zero),
                    (begin[batch] - zero, end[batch] - zero),
                    line["work"],
                )  # fmt: skip
            )
        return rows


def run_arms(run: SeedRun, num_batches: int, limit: int, least_seconds: float) -> list[Arm]:
    """Warm up, then train both arms one after the other."""
    run.prepare()
    arms = [
        Arm("synchronous", 0, run.folder / "synchronous", num_batches, least_seconds),
        Arm("asynchronous", limit, run.folder / "asynchronous", num_batches, least_seconds),
    ]
    for arm in arms:
        print(f"{arm.name}: rollouts at most {counted(arm.limit, 'batch')} old", flush=True)
        arm.run(run.seed, run.settings.groups, run.warm_up_checkpoint)
    return arms


def compare(arms: Sequence[Arm], ledgers: Sequence[Sequence[LedgerRow]]) -> dict[str, Any]:
    """The arms in numbers: seconds, their ratio, ages.

    Raises:
        TrainingFailed: A rollout was trained that is older than its arm allows, or some rollouts
            of a batch were not trained.
    """
    shown: dict[str, Any] = {}
    for arm, rows in zip(arms, ledgers, strict=True):
        wrong = [r for r in rows if r.age > arm.limit or r.rollouts != r.trained_rollouts]
        if wrong or len(rows) != arm.num_batches:
            raise TrainingFailed(
                f"{arm.name}: {len(rows)} of {arm.num_batches} batches were trained; too old or "
                f"trained in part: {wrong}"
            )
        fifth = max(1, len(rows) // 5)
        shown[arm.name] = {
            "limit": arm.limit,
            "oldest": max(row.age for row in rows),
            "batches": len(rows),
            "rollouts": sum(row.trained_rollouts for row in rows),
            "generation_seconds": _mean(row.generated[1] - row.generated[0] for row in rows),
            "generation_work_seconds": _mean(row.generation_work for row in rows),
            "training_seconds": _mean(row.trained[1] - row.trained[0] for row in rows),
            "loop_seconds": rows[-1].trained[1],
            "wall_seconds": arm.wall_seconds,
            "reward_first_fifth": _mean(row.reward for row in rows[:fifth]),
            "reward_last_fifth": _mean(row.reward for row in rows[-fifth:]),
            "ledger": [asdict(row) for row in rows],
        }
    synchronous, asynchronous = (shown[arm.name] for arm in arms)
    for name in ("wall", "loop"):
        ratio = asynchronous[f"{name}_seconds"] / synchronous[f"{name}_seconds"]
        shown[f"{name}_ratio"] = ratio
    return shown


def comparison_lines(shown: dict[str, Any]) -> list[str]:
    """Four lines of numbers."""
    lines = [
        f"{name}: {s['wall_seconds']:.1f} s, {s['loop_seconds']:.1f} s of it after the start-up; "
        f"a batch is generated in {s['generation_seconds']:.2f} s and trained in "
        f"{s['training_seconds']:.2f} s; mean reward {s['reward_first_fifth']:.2f} in the first "
        f"fifth, {s['reward_last_fifth']:.2f} in the last; "
        f"{counted(s['rollouts'], 'rollout')} trained, the oldest "
        f"{counted(s['oldest'], 'batch')} old (limit {s['limit']})"
        for name, s in shown.items()
        if isinstance(s, dict)
    ]
    ratio = shown["wall_ratio"]
    lines.append(
        f"wall time asynchronous / synchronous: {ratio:.2f} (without the start-up "
        f"{shown['loop_ratio']:.2f}), {'within' if ratio <= BAR else 'MISSES'} the bar of {BAR}"
    )
    return lines


def ledger_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each row of a ledger."""
    return [
        f"batch {row['batch_id']}: generated {row['generated'][0]:.2f} – {row['generated'][1]:.2f} "
        f"s, trained {row['trained'][0]:.2f} – {row['trained'][1]:.2f} s; "
        f"{counted(row['trained_rollouts'], 'rollout')} by weights of "
        f"{counted(row['oldest_version'], 'batch')}, "
        f"{counted(row['age'], 'batch')} old; mean reward {row['reward']:.3f}"
        for row in rows
    ]


def _mean(values: Any) -> float:
    return float(np.mean(list(values)))

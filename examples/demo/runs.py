"""One seed of the demo: warm-up and reinforcement learning, each a run of Megatron's pretrain."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from examples.demo.results import policy_line, warm_up_line
from examples.demo.task import VOCAB_SIZE, write_demonstrations
from examples.demo.training import (
    REPOSITORY,
    drop_partial_line,
    read_json_lines,
    read_reports,
    train,
)
from megatron_dynbatch import RolloutDirectory
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.report import StepReport

MAX_TOKENS_PER_GPU = 256
ROLLOUTS_PER_STEP = 48
WARM_UP_SIZES = (24, 72)
SAVE_INTERVAL = 5

LAYOUTS = {
    "dp2": ParallelLayout(dp=2),
    "pp2": ParallelLayout(pp=2),
    "tp2": ParallelLayout(tp=2),
    "cp2": ParallelLayout(cp=2),
}

NUM_HEADS = 4
MODEL = [
    "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "128",
    "--num-attention-heads", str(NUM_HEADS), "--normalization", "RMSNorm", "--swiglu",
    "--disable-bias-linear", "--untie-embeddings-and-output-weights",
    "--position-embedding-type", "learned_absolute", "--max-position-embeddings", "512",
    "--attention-dropout", "0", "--hidden-dropout", "0",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE),
    "--make-vocab-size-divisible-by", "16",
    "--eval-iters", "0", "--log-interval", "1", "--ckpt-format", "torch",
]  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the user chose.

    Attributes:
        layout: Key of `LAYOUTS`.
        warm_up_steps: Supervised steps before it.
        steps: Steps of reinforcement learning.
        groups: Prompt groups per batch on average.
        shuffle_advantages: Give each sample the advantage of another one: nothing is learned then.
        resume: Go on where an earlier run stopped.
    """

    layout: str = "dp2"
    warm_up_steps: int = 30
    steps: int = 120
    groups: int = 12
    shuffle_advantages: bool = False
    resume: bool = False

    @property
    def plan_options(self) -> PlanOptions:
        """How training plans each batch."""
        return PlanOptions(
            max_tokens_per_gpu=MAX_TOKENS_PER_GPU,
            rollouts_per_step=ROLLOUTS_PER_STEP,
            leftover="even",
        )


class SeedRun:
    """The files of one seed, and what makes them.

    Args:
        folder: Where everything goes.
        seed: Of weights, words and sampling.
        settings: What the user chose.
    """

    def __init__(self, folder: Path, seed: int, settings: Settings) -> None:
        self.folder = folder
        self.seed = seed
        self.settings = settings
        self.demonstrations = folder / "demonstrations"
        self.warm_up_checkpoint = folder / "warm-up"
        self.rollouts = folder / "rollouts"
        self.checkpoint = folder / "checkpoint"
        self.episodes_file = folder / "episodes.jsonl"
        self.steps_file = folder / "steps.jsonl"
        self.warm_up_file = folder / "warm-up.jsonl"
        self.progress_file = folder / "progress.jsonl"

    def run(self) -> None:
        """Both runs, or what is left of them when resumed.

        Raises:
            TrainingFailed: A process ended with an error.
        """
        self.prepare()
        if not _has_checkpoint(self.checkpoint):
            self._forget_policy_run()
        if len(self.reports()) < self.settings.steps:
            self._train_policy()

    def prepare(self) -> None:
        """The warm-up, unless a resumed run has it already.

        Raises:
            TrainingFailed: A process ended with an error.
        """
        if not self.settings.resume:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in (self.episodes_file, self.steps_file):
            drop_partial_line(file)
        if not _has_checkpoint(self.warm_up_checkpoint):
            self._warm_up()

    def reports(self) -> list[StepReport]:
        """Reports of the steps of reinforcement learning."""
        return read_reports(self.steps_file)

    def _forget_policy_run(self) -> None:
        shutil.rmtree(self.rollouts, ignore_errors=True)
        for file in (self.episodes_file, self.steps_file):
            file.unlink(missing_ok=True)

    def _parallel_flags(self) -> list[str]:
        layout = LAYOUTS[self.settings.layout]
        return [
            "--tensor-model-parallel-size", str(layout.tp),
            "--pipeline-model-parallel-size", str(layout.pp),
            "--context-parallel-size", str(layout.cp),
            "--seed", str(self.seed),
        ]  # fmt: skip

    def warm_up_launch(self) -> list[str]:
        """Supervised steps, with a script that knows nothing of the plugin."""
        num_steps = str(self.settings.warm_up_steps)
        return [
            str(REPOSITORY / "examples" / "pretrain_gpt_sft.py"), *MODEL, *self._parallel_flags(),
            "--lr", "4e-3", "--lr-decay-style", "constant", "--adam-beta2", "0.95",
            "--train-iters", num_steps, "--save", str(self.warm_up_checkpoint),
            "--save-interval", num_steps,
            "--dynamic-global-batch", "--rollout-path", str(self.demonstrations),
            "--rollouts-per-step", str(WARM_UP_SIZES[1]),
            "--max-tokens-per-gpu", str(MAX_TOKENS_PER_GPU),
            "--step-report", str(self.warm_up_file),
        ]  # fmt: skip

    def policy_launch(self) -> list[str]:
        """GRPO, with rollouts made at the step boundary."""
        settings = self.settings
        resumes = _has_checkpoint(self.checkpoint)
        load = self.checkpoint if resumes else self.warm_up_checkpoint
        flags = [
            "--module", "examples.demo.policy", *MODEL, *self._parallel_flags(),
            "--load", str(load), "--save", str(self.checkpoint),
            "--save-interval", str(SAVE_INTERVAL),
            "--lr", "2e-3", "--min-lr", "2e-4", "--lr-decay-style", "linear",
            "--lr-decay-iters", str(settings.steps), "--lr-warmup-iters", str(settings.steps // 12),
            "--adam-beta2", "0.99", "--clip-grad", "1.0", "--train-iters", str(settings.steps),
            "--dynamic-global-batch", "--rollout-path", str(self.rollouts),
            "--rollouts-per-step", str(ROLLOUTS_PER_STEP), "--leftover", "even",
            "--max-tokens-per-gpu", str(MAX_TOKENS_PER_GPU), "--micro-batch-width", "variable",
            "--step-report", str(self.steps_file),
            "--demo-seed", str(self.seed), "--demo-groups", str(settings.groups),
            "--demo-log", str(self.episodes_file), "--demo-progress", str(self.progress_file),
        ]  # fmt: skip
        if not resumes:
            flags.append("--finetune")
        if settings.shuffle_advantages:
            flags.append("--demo-shuffle-advantages")
        return flags

    def write_demonstrations(self) -> None:
        """Rollouts for the warm-up."""
        shutil.rmtree(self.demonstrations, ignore_errors=True)
        self.warm_up_file.unlink(missing_ok=True)
        draw = random.Random(self.seed)
        sizes = [draw.randint(*WARM_UP_SIZES) for _ in range(self.settings.warm_up_steps)]
        write_demonstrations(RolloutDirectory(self.demonstrations), sizes, self.seed)

    def _warm_up(self) -> None:
        self.write_demonstrations()
        num_steps = self.settings.warm_up_steps
        with _progress() as progress:
            bar = progress.add_task("warm-up steps", total=num_steps)

            def on_step(report: StepReport) -> None:
                progress.update(bar, completed=report.iteration)
                _print_line(progress, warm_up_line(report, num_steps))

            log = self.folder / "warm-up.log"
            train(self.warm_up_launch(), self.warm_up_file, log, on_step)

    def _train_policy(self) -> None:
        settings = self.settings
        self.progress_file.unlink(missing_ok=True)
        with _progress() as progress:
            steps = progress.add_task("steps", total=settings.steps)
            now = progress.add_task("micro-batches", total=None)

            def on_step(report: StepReport) -> None:
                progress.update(steps, completed=report.iteration)
                reward = self._reward(report.batch_id)
                _print_line(progress, policy_line(report, reward, settings.steps))

            def on_poll() -> None:
                _show_now(progress, now, self.progress_file)

            log = self.folder / "policy.log"
            train(self.policy_launch(), self.steps_file, log, on_step, on_poll=on_poll)

    def _reward(self, batch_id: int) -> float:
        lines = read_json_lines(self.episodes_file)
        return next(line["reward"] for line in reversed(lines) if line["batch_id"] == batch_id)


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "latest_checkpointed_iteration.txt").exists()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )


def _print_line(progress: Progress, line: str) -> None:
    progress.console.print(line, highlight=False, soft_wrap=True)


def _show_now(progress: Progress, bar: TaskID, file: Path) -> None:
    """The second bar: micro-batches of the step that runs, or that rollouts are being made."""
    lines = read_json_lines(file)
    if not lines:
        return
    last = lines[-1]
    if "playing" in last:
        progress.update(bar, description="making rollouts", completed=0, total=None)
    else:
        progress.update(
            bar,
            description="micro-batches",
            completed=last["micro_batch"] + 1,
            total=last["num_microbatches"],
        )

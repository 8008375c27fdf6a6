"""``python -m examples.demo --out DIR``: supervised steps of different sizes, two processes.

Problems of reasoning-gym with their worked solutions are written as rollouts, one batch per step;
Megatron's own ``pretrain`` trains a small GPT on them from a script that knows nothing of the
plugin. DIR gets summary.json, steps.png, steps.jsonl (one line per step) and train.log.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path

from examples.demo.charts import draw_steps
from examples.demo.results import print_table, step_line, summary, write_summary
from examples.demo.training import REPOSITORY, TrainingFailed, train
from examples.demo.worked_solutions import Written, write_worked_solutions
from megatron_dynbatch.report import StepReport

MAX_TOKENS_PER_GPU = 1024
STEP_SIZES = (4, 20)
SCRIPT = REPOSITORY / "examples" / "pretrain_gpt_sft.py"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__.split("\n")[0].split(": ")[1]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for all results")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default: 60)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def megatron_arguments(written: Written, out: Path) -> list[str]:
    """The script with a small GPT, and the plugin's flags."""
    return [
        str(SCRIPT),
        # the model
        "--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4",
        "--position-embedding-type", "rope", "--max-position-embeddings", str(MAX_TOKENS_PER_GPU),
        "--attention-dropout", "0", "--hidden-dropout", "0",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(written.vocab_size),
        # the training: horizons count rollouts
        "--lr", "3e-3", "--min-lr", "3e-4", "--lr-decay-style", "cosine",
        "--train-samples", str(written.num_rollouts),
        "--lr-decay-samples", str(written.num_rollouts),
        "--lr-warmup-samples", str(written.num_rollouts // 10),
        "--adam-beta2", "0.95", "--clip-grad", "1.0", "--eval-iters", "0", "--log-interval", "1",
        # the plugin
        "--dynamic-global-batch", "--rollout-path", str(out / "rollouts"),
        "--rollouts-per-step", "batch", "--max-tokens-per-gpu", str(MAX_TOKENS_PER_GPU),
        "--step-report", str(out / "steps.jsonl"),
    ]  # fmt: skip


def prepare(out: Path) -> None:
    """Make the folder, and remove what an earlier demo left there."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "rollouts", ignore_errors=True)
    for name in ("steps.jsonl", "train.log", "summary.json", "steps.png"):
        (out / name).unlink(missing_ok=True)


def run(out: Path, num_steps: int, seed: int) -> None:
    """Write the rollouts, train on them, and show what came out."""
    start = time.monotonic()
    out = out.resolve()
    prepare(out)
    draw = random.Random(seed)
    sizes = [draw.randint(*STEP_SIZES) for _ in range(num_steps)]
    written = write_worked_solutions(out / "rollouts", sizes, seed)
    print(
        f"{written.num_rollouts} rollouts with {written.num_samples} worked solutions, vocabulary "
        f"of {written.vocab_size} words; training {num_steps} steps on two processes",
        flush=True,
    )
    reports: list[StepReport] = []

    def on_step(report: StepReport) -> None:
        reports.append(report)
        print(step_line(report, num_steps), flush=True)

    train(megatron_arguments(written, out), out / "steps.jsonl", out / "train.log", on_step)
    if len(reports) != num_steps:
        raise TrainingFailed(f"{len(reports)} steps were trained instead of {num_steps}")
    print_table(reports)
    write_summary(out / "summary.json", summary(reports, time.monotonic() - start))
    draw_steps(reports, "Supervised training with a global batch per step", out / "steps.png")
    print(f"summary.json, steps.png and train.log are in {out}")


def main() -> int:
    """Exit code 1 with the reason if training failed."""
    arguments = parse_arguments()
    try:
        run(arguments.out, arguments.steps, arguments.seed)
    except TrainingFailed as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.stock.run DIR``: Megatron-LM's own pretrain_gpt.py, unmodified.

DIR is a checkout of Megatron-LM. Its pretrain_gpt.py is run under the launcher on the CPU, with
the flag on, and so is examples/pretrain_gpt_sft.py on the Megatron that is installed: same
rollouts, one layout after the other, in two or four processes. Every number that a step reports
must agree. docs/stock.md records commit and result.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distribution, version
from pathlib import Path

import numpy as np

from examples.demo.training import REPOSITORY, TrainingFailed, train
from megatron_dynbatch import RolloutDirectory, Sample
from megatron_dynbatch.report import StepReport
from tests.deviation import largest, relative

STEP_SIZES = (8, 5, 12, 3, 9, 8)
# Processes, and Megatron's options.
LAYOUTS: dict[str, tuple[int, Sequence[str]]] = {
    "DP2": (2, ()),
    "TP2": (2, ("--tensor-model-parallel-size", "2")),
    "CP2": (2, ("--context-parallel-size", "2")),
    "PP2": (2, ("--pipeline-model-parallel-size", "2")),
    "PP4": (4, ("--pipeline-model-parallel-size", "4")),
    "PP2xVPP2": (
        2,
        ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
    ),
}
TOLERANCE = 1e-5
WIDTH = 128
VOCAB_SIZE = 96
RECORD = REPOSITORY / "docs" / "stock.md"
OURS = REPOSITORY / "examples" / "pretrain_gpt_sft.py"


@dataclass(frozen=True)
class Result:
    """One layout's comparison.

    Attributes:
        layout: Name of the layout.
        stock: Step reports of the stock script.
        ours: Step reports of our script.
        difference: Largest relative difference of loss, grad norm and learning rate.
    """

    layout: str
    stock: Sequence[StepReport]
    ours: Sequence[StepReport]
    difference: float


def write_rollouts(directory: Path) -> None:
    """One batch per step: 1 to 4 samples a rollout, distinct lengths, some masked entirely."""
    draw = np.random.default_rng(7)
    rollouts = RolloutDirectory(directory, vocab_size=VOCAB_SIZE)
    for size in STEP_SIZES:
        samples = []
        for rollout_id in range(size):
            for _ in range(draw.integers(1, 5)):
                tokens = draw.integers(0, VOCAB_SIZE, draw.integers(4, 60))
                mask = draw.random(draw.integers(1, len(tokens))) < draw.choice([0.0, 0.8, 1.0])
                samples.append(Sample(tokens, loss_mask=mask, rollout_id=rollout_id))
        rollouts.write(samples)
    rollouts.finish()


def megatron_arguments(layout: str, rollouts: Path, reports: Path) -> list[str]:
    """A tiny GPT and the plugin's flags."""
    samples = str(sum(STEP_SIZES))
    cap = WIDTH // (2 if layout == "CP2" else 1)
    return [
        "--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4",
        "--position-embedding-type", "rope", "--max-position-embeddings", str(WIDTH),
        "--attention-dropout", "0", "--hidden-dropout", "0",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE),
        *LAYOUTS[layout][1],
        "--lr", "1e-2", "--min-lr", "0", "--lr-decay-style", "linear",
        "--train-samples", samples, "--lr-decay-samples", samples,
        "--eval-iters", "0", "--log-interval", "1",
        "--dynamic-global-batch", "--rollout-path", str(rollouts),
        "--rollouts-per-step", "batch", "--max-tokens-per-gpu", str(cap),
        "--step-report", str(reports),
    ]  # fmt: skip


def run_script(
    script: Path, name: str, layout: str, folder: Path, python_path: Path | None
) -> list[StepReport]:
    """Train with one script; returns its step reports."""
    reports: list[StepReport] = []
    report_file = folder / f"{layout}-{name}.jsonl"
    arguments = megatron_arguments(layout, folder / "rollouts", report_file)
    train(
        [str(script), *arguments],
        report_file,
        folder / f"{layout}-{name}.log",
        reports.append,
        num_processes=LAYOUTS[layout][0],
        environment={"PYTHONPATH": str(python_path)} if python_path else None,
    )
    return reports


def relative_difference(stock: Sequence[StepReport], ours: Sequence[StepReport]) -> float:
    """Largest over the steps; infinite if counts differ or something is not finite.

    Args:
        stock: Reports of one run.
        ours: Reports of the other one.
    """
    counted = (
        "step_global_batch_size", "num_samples", "num_microbatches", "num_trained_tokens",
        "consumed_rollouts",
    )  # fmt: skip
    if len(stock) != len(STEP_SIZES) or len(ours) != len(STEP_SIZES):
        return float("inf")
    worst = 0.0
    for a, b in zip(stock, ours, strict=True):
        if any(getattr(a, name) != getattr(b, name) for name in counted):
            return float("inf")
        for x, y in zip(_measured(a), _measured(b), strict=True):
            worst = largest([worst, relative(x, y, least=1e-12)])
    return worst


def _measured(report: StepReport) -> tuple[float, float, float]:
    assert report.grad_norm is not None and report.learning_rate is not None
    return report.metrics["lm loss"], report.grad_norm, report.learning_rate


def bring_dataset_helpers(checkout: Path) -> None:
    """Give a checkout that was never built the compiled helpers of the installed megatron-core.

    Megatron builds them at start-up otherwise, which needs a compiler and pybind11; nothing here
    uses them, and git ignores them.
    """
    datasets = Path(str(distribution("megatron-core").locate_file("megatron/core/datasets")))
    for built in datasets.glob("helpers_cpp*.so"):
        target = checkout / "megatron" / "core" / "datasets" / built.name
        if not target.exists():
            shutil.copy(built, target)


def commit_of(checkout: Path) -> str:
    """Commit of a checkout, or its VERSION where git does not know it."""
    git = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return git.stdout.strip() if git.returncode == 0 else "unknown (not a git checkout)"


def record(commit: str, results: Sequence[Result]) -> str:
    """The text of docs/stock.md."""
    lines = [
        "# Megatron-LM's own pretrain_gpt.py",
        "",
        "Written by `make test-stock MEGATRON_LM=DIR`. The checkout's `pretrain_gpt.py`,",
        "unmodified, and `examples/pretrain_gpt_sft.py` on the installed megatron-core train the",
        f"same rollouts, steps of {', '.join(map(str, STEP_SIZES))}, on two or four CPU",
        "processes. Loss, gradient norm and learning rate of every step must agree within a",
        f"relative {TOLERANCE:g}, counts exactly.",
        "",
        f"* Megatron-LM commit: `{commit}`",
        f"* installed megatron-core: {version('megatron-core')}, torch {version('torch')}",
        "",
        "| layout | steps | largest difference | loss, first → last step | result |",
        "|---|---|---|---|---|",
    ]
    for r in results:
        first, last = (r.stock[i].metrics["lm loss"] for i in (0, -1))
        verdict = "agrees" if r.difference <= TOLERANCE else "DIFFERS"
        lines.append(
            f"| {r.layout} | {len(r.stock)} | {r.difference:.1e} | {first:.6f} → {last:.6f} "
            f"| {verdict} |"
        )
    return "\n".join(lines) + "\n"


def compare(checkout: Path, folder: Path) -> list[Result]:
    """Run both scripts at every layout."""
    bring_dataset_helpers(checkout)
    write_rollouts(folder / "rollouts")
    results = []
    for layout in LAYOUTS:
        print(f"{layout}: pretrain_gpt.py of the checkout", flush=True)
        stock = run_script(checkout / "pretrain_gpt.py", "stock", layout, folder, checkout)
        print(f"{layout}: {OURS.name}", flush=True)
        ours = run_script(OURS, "ours", layout, folder, None)
        difference = relative_difference(stock, ours)
        print(f"{layout}: largest relative difference {difference:.1e}", flush=True)
        results.append(Result(layout, stock, ours, difference))
    return results


def main() -> int:
    """Exit code 0 if all numbers agree."""
    parser = argparse.ArgumentParser(prog="python -m tests.stock.run")
    parser.add_argument("checkout", type=Path, help="a checkout of Megatron-LM")
    checkout = parser.parse_args().checkout.resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        parser.error(f"{checkout} is not a checkout of Megatron-LM: it has no pretrain_gpt.py")
    folder = Path(tempfile.mkdtemp(prefix="dynbatch-stock-"))
    try:
        results = compare(checkout, folder)
    except TrainingFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    RECORD.write_text(record(commit_of(checkout), results), encoding="utf-8")
    print(f"recorded in {RECORD.relative_to(REPOSITORY)}")
    return 0 if all(r.difference <= TOLERANCE for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())

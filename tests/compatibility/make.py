"""Makes the files of `before/`: what a version of the package writes, for later ones to read.

They were made by the commit that `before/made_by.json` names. To make them again, copy this file
into a checkout of that commit and run there

    python -m tests.compatibility.make FOLDER

    rollouts/     a directory: a batch that was deleted, one with a plan, parts and a key, one with
                  every column, notes, END
    plans/        plans as JSON, with their fingerprints
    cursors.json  cursors after each step of an own loop over rollouts/, as `Cursor.to_dict` says
    ledger.jsonl  of that loop
    training/     rollouts of a tiny GPT; whole.json: its steps, never interrupted; checkpoint/: a
                  training that ended inside batch 1; without-cursor/: one without the plugin
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_dynbatch import __version__
from megatron_dynbatch.handshake import publish_layout, write_planned
from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps import StepFeed
from megatron_dynbatch.steps.ledger import Ledger
from tests.pool import run_ranks
from tests.rollouts.helpers import random_samples

LAYOUT = ParallelLayout(dp=2)
OPTIONS = PlanOptions(max_tokens_per_gpu=64, rollouts_per_step=2, leftover="carry")

# A GPT of a few thousand parameters; a later occurrence of a flag wins over `tests.cpu.training`.
TINIEST = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 16 "
    "--vocab-size 31 --max-position-embeddings 64 --ckpt-format torch --save-interval 100"
).split()
TRAIN = (
    "--dynamic-global-batch --rollout-path rollouts --rollouts-per-step 4 --max-tokens-per-gpu 64 "
    "--train-iters 5 --lr-decay-style linear --no-bias-swiglu-fusion"
).split()


def samples(number: int, count: int) -> list[Sample]:
    """Rollouts of one sample, of lengths and tokens that follow from the batch's number."""
    return [
        Sample(
            [(7 * number + 3 * row + k) % 29 for k in range(6 + (5 * row + number) % 9)],
            loss_mask=[1, 0, 1, 1][: 2 + row % 3],
            rollout_id=row,
            advantage=0.5 - 0.25 * row,
        )
        for row in range(count)
    ]


def write_rollouts(path: Path) -> None:
    """The directory of all kinds of batches, and what an own loop makes of it."""
    directory = RolloutDirectory(path)
    publish_layout(directory, LAYOUT, OPTIONS)
    directory.write(random_samples(5, seed=0))
    write_planned(directory, random_samples(9, seed=1), key="epoch-0")
    directory.write(random_samples(7, seed=2), key="epoch-1")
    directory.finish()


def train_alone(folder: Path) -> None:
    """One process over the directory: cursors and ledger, then batch 0 is deleted."""
    source = RolloutDirectory(folder / "rollouts")
    ledger = Ledger(folder / "ledger.jsonl")
    feed = StepFeed(source, ParallelLayout(), OPTIONS, ledger=ledger)
    cursors = [feed.cursor.to_dict()]
    while feed.open_step() is not None:
        feed.finish_step()
        cursors.append(feed.cursor.to_dict())
    feed.close()
    source.delete_before(1)
    write_json(folder / "cursors.json", cursors)


def write_plans(folder: Path) -> None:
    """Plans for two layouts, and what they say of themselves."""
    folder.mkdir()
    index = RolloutDirectory(folder.parent / "rollouts").index(1)
    pipeline = ParallelLayout(dp=2, pp=2, vpp=2)
    for name, layout in {"data-parallel": LAYOUT, "pipeline": pipeline}.items():
        plan = make_plan(index, layout, OPTIONS)
        (folder / f"{name}.json").write_text(plan.to_json() + "\n")
        (folder / f"{name}.fingerprint").write_text(plan.fingerprint + "\n")


def train_job(
    folder: str, argv: list[str], hooks: bool, weights_seed: int | None = 1234
) -> list[dict[str, float]]:
    """A training in a folder, so that no file names another one; rows as of `Training`."""
    from tests.cpu import training

    os.chdir(folder)
    stock, kept = training.Training, training.Training()
    training.Training = lambda: kept  # type: ignore[assignment, misc]
    try:
        training.train([*TINIEST, *argv], install_hooks=hooks, weights_seed=weights_seed)
    except SystemExit as end:  # --exit-interval
        assert not end.code
    finally:
        training.Training = stock  # type: ignore[misc]
    return kept.rows


def write_training(folder: Path) -> None:
    """A whole run, one that ended in the middle of a batch, one without the plugin."""
    folder.mkdir()
    directory = RolloutDirectory(folder / "rollouts")
    for number, count in enumerate((6, 10)):
        directory.write(samples(number, count))
    directory.finish()
    whole = run_ranks(1, train_job, str(folder), TRAIN, True)[0]
    write_json(folder / "whole.json", whole)
    part = [*TRAIN, "--save", "checkpoint", "--exit-interval", "4"]
    assert run_ranks(1, train_job, str(folder), part, True)[0] == whole[:4]
    stock = ["--train-iters", "1", "--save", "without-cursor"]
    run_ranks(1, train_job, str(folder), stock, True)
    shutil.rmtree(folder / "rollouts" / "notes")


def write_json(path: Path, values: Any) -> None:
    """Values as a file."""
    path.write_text(json.dumps(values, indent=1) + "\n")


def main() -> None:
    """Write everything into a new folder."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    made_by = {
        "commit": commit,
        "megatron_dynbatch": __version__,
        "megatron-core": version("megatron-core"),
    }
    write_json(folder / "made_by.json", made_by)
    write_rollouts(folder / "rollouts")
    train_alone(folder)
    write_plans(folder / "plans")
    write_training(folder / "training")


if __name__ == "__main__":
    from tests.compatibility import make  # ranks look for their function in a module of that name

    make.main()

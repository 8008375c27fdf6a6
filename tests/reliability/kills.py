"""Trainings that die at every durable write, start again by themselves, and what they left."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dynbatch.failpoints import WRITES
from tests.parity.job import Cell
from tests.parity.reference import Recipe
from tests.parity.rollouts import CAPACITY, make_steps, write_batches
from tests.pool import ROOT
from tests.reliability.killed_training import MEGATRONS
from tests.reliability.writers_under_fire import BATCHES, SEED

PER_STEP = 2
TOTAL = sum(BATCHES)
NUM_STEPS = TOTAL // PER_STEP
SAVE_INTERVAL = 3
CHAIN = 4
"""Kills in one job."""

ACTIONS = ("kill", "term", "enospc")

# Notes and deletions are services: a full disk there is a line in the log, and training goes on.
TOLERATED = ("notes", "note", "note-move", "deletion-mark", "deletion")
# What a trainer writes, and up to which passage it is stopped there.
TRAINER = {
    "notes": 1, "note": 2, "note-move": 2, "ledger-probe": 1, "ledger-cut": 1, "ledger-mend": 1,
    "ledger-mend-move": 1, "ledger": 4, "deletion-mark": 1, "deletion": 3,
}  # fmt: skip
# A ledger that begins with these bytes has a torn line in its middle, or at its end.
TORN = {"ledger-mend": "middle", "ledger-mend-move": "middle", "ledger-cut": "end"}
_TORN_LINE = '{"batch_id":0,"step_index":0,"consu'
_WHOLE_LINE = (
    '{"batch_id":0,"step_index":0,"consumed":[],"dropped":[],"trained_tokens":0}\n'
)


@dataclass(frozen=True)
class Chain:
    """One job: what ends its attempts, one after the other.

    Attributes:
        places: As of `failpoints`.
        ranks: Processes.
        is_async: Whether checkpoints are saved asynchronously.
        torn_ledger: Where the ledger that it finds has a torn line: "", "middle" or "end".
    """

    places: tuple[str, ...]
    ranks: int = 1
    is_async: bool = False
    torn_ledger: str = ""

    def __str__(self) -> str:
        how = f"{self.ranks} ranks{', async' if self.is_async else ''}"
        return f"{how}: {' '.join(self.places)}"


def chains(seed: int = 5) -> list[Chain]:
    """Every place and action of the trainer, in jobs of a few kills each."""
    draw = random.Random(seed)

    def places(writes: dict[str, tuple[str, ...]], actions: Sequence[str] = ACTIONS) -> list[str]:
        found = [
            f"{name.replace(' ', '_')}:{at}:{draw.randint(1, TRAINER.get(name, 2))}:{action}"
            for name, positions in writes.items()
            for at in positions
            for action in actions
            if (action, at) != ("enospc", "after")  # what is written is written
        ]
        draw.shuffle(found)
        return found

    own = places({name: WRITES[name] for name in TRAINER if name not in TORN})
    tolerated = [p for p in own if p.endswith("enospc") and p.partition(":")[0] in TOLERATED]
    fatal = [p for p in own if p not in tolerated]
    kept = {name: MEGATRONS[name] for name in ("checkpoint", "tracker")}
    code = {name: at for name, at in MEGATRONS.items() if name not in kept}
    jobs = [Chain(tuple(fatal[i : i + CHAIN])) for i in range(0, len(fatal), CHAIN)]
    for is_async in (False, True):
        own = places(kept)
        jobs += [
            Chain(tuple(own[i : i + CHAIN]), is_async=is_async) for i in range(0, len(own), CHAIN)
        ]
    own = [f"{place}:{draw.randint(0, 1)}" for place in places(code, ("kill", "term"))]
    jobs += [Chain(tuple(own[i : i + CHAIN]), ranks=2) for i in range(0, len(own), CHAIN)]
    for name, where in TORN.items():
        own = places({name: WRITES[name]})
        jobs += [
            Chain(tuple(own[i : i + CHAIN]), torn_ledger=where) for i in range(0, len(own), CHAIN)
        ]
    # A tolerated fault does not end its attempt: it is the last of a job.
    return [
        Chain((*job.places, *tolerated[i : i + 1]), job.ranks, job.is_async, job.torn_ledger)
        for i, job in enumerate(jobs)
    ]


def write_rollouts(path: Path) -> None:
    """What every job trains on."""
    write_batches(path, make_steps(BATCHES, seed=SEED))


def write_under_fire(path: Path) -> None:
    """The same batches from writers that die at every place of theirs, one after the other."""
    command = [sys.executable, "-m", "tests.reliability.writers_under_fire", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)


def run(rollouts: Path, folder: Path, chain: Chain, timeout: float = 280.0) -> None:
    """A whole job, through real torchrun, in `folder`.

    Raises:
        AssertionError: It did not end well, or did not pass a place.
    """
    shutil.copytree(rollouts, folder / "rollouts")
    ledger = folder / "ledger.jsonl"
    if chain.torn_ledger:
        rest = _WHOLE_LINE if chain.torn_ledger == "middle" else ""
        ledger.write_text(_WHOLE_LINE + _TORN_LINE + rest)
    saved = folder / "checkpoints"
    flags = {
        "dynamic-global-batch": True,
        "rollout-path": folder / "rollouts",
        "rollouts-per-step": PER_STEP,
        "max-tokens-per-gpu": CAPACITY,
        "train-samples": TOTAL,
        "precision": "float32",
        "step-report": folder / "steps.jsonl",
        "rollout-ledger": ledger,
        "save": saved,
        "load": saved,
        "save-interval": SAVE_INTERVAL,
        "keep-batches": 0,
    }
    if chain.is_async:
        flags |= {"async-save": True, "use-persistent-ckpt-worker": True}
        flags |= {"async-strategy": "mcore"}
    cell = Cell(chain.ranks, flags, Recipe(decay=TOTAL, warmup=4))
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    torchrun += ["--nproc-per-node", str(chain.ranks), "--max-restarts", str(len(chain.places))]
    torchrun += ["--monitor-interval", "0.1"]
    torchrun += ["--standalone", str(ROOT / "tests" / "reliability" / "killed_training.py")]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "KILLED_AT": " ".join([str(folder), *chain.places]),
    }
    with open(folder / "log", "wb") as log:
        done = subprocess.run(
            [*torchrun, *cell.argv()],
            cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=timeout,
        )  # fmt: skip
    tail = (folder / "log").read_text(errors="replace")[-6000:]
    assert done.returncode == 0, f"{chain} ended with {done.returncode}:\n{tail}"
    missed = [
        place for k, place in enumerate(chain.places) if not (folder / f"killed-{k}").exists()
    ]
    assert not missed, f"{chain} never passed {missed}:\n{tail}"


@dataclass(frozen=True)
class Row:
    """A logged step, as far as a restart may not change it."""

    iteration: int
    batch_id: int
    step_index: int
    step_global_batch_size: int
    consumed_rollouts: int
    learning_rate: float
    grad_norm: float
    loss: float


def rows(folder: Path) -> list[Row]:
    """Every step that was logged, those that were trained again too."""
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    names = [name for name in Row.__dataclass_fields__ if name != "loss"]
    return [Row(*(line[name] for name in names), loss=line["metrics"]["lm loss"]) for line in lines]


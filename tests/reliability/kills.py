"""Trainings that die at every durable write, start again by themselves, and what they left."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dynbatch.failpoints import WRITES
from megatron_dynbatch.rollouts.hidden import hidden_name
from tests.parity.job import Cell
from tests.parity.reference import Recipe
from tests.parity.rollouts import CAPACITY, make_steps, write_batches
from tests.pool import ROOT
from tests.reliability.killed_training import MEGATRONS
from tests.reliability.launcher import FORMS, torchrun
from tests.reliability.writers_under_fire import BATCHES, SEED

PER_STEP = 2
TOTAL = sum(BATCHES)
NUM_STEPS = TOTAL // PER_STEP
SAVE_INTERVAL = 3
CHAIN = 4
"""Kills in one job."""

ACTIONS = ("kill", "term", "enospc")

# Notes and deletions are services: a full disk there is a line in the log, and training goes on.
TOLERATED = (
    "notes", "note", "note-move", "deletion-mark", "deletion", "leftover-move", "leftover",
)  # fmt: skip
# What a trainer writes in any job, and up to which passage it is stopped there.
TRAINER = {
    "notes": 1, "note": 2, "note-move": 2, "ledger-probe": 1, "ledger-cut": 1, "ledger": 4,
    "deletion-mark": 1, "deletion": 3,
}  # fmt: skip
# What it writes only where something is to be mended, and what then begins the job: see `Chain`.
MENDER = {
    "torn ledger": ("ledger-mend", "ledger-mend-move"),
    "leftovers": ("leftover-move", "leftover"),
    "torn tracker": ("tracker-mend", "tracker-mend-move"),
}
# Passed only before there is any note; any attempt may leave the first.
FIRST = ("notes:after",)
# After these it is mended, and no later attempt comes there.
MENDED = ("ledger-mend-move:after", "tracker-mend-move:after")
NUM_LEFTOVERS = 9

_TORN_LINE = '{"batch_id":0,"step_index":0,"consu'
_WHOLE_LINE = '{"batch_id":0,"step_index":0,"consumed":[],"dropped":[],"trained_tokens":0}\n'


@dataclass(frozen=True)
class Chain:
    """One job: what ends its attempts, one after the other.

    Attributes:
        places: As of `failpoints`.
        ranks: Processes.
        is_async: Whether checkpoints are saved asynchronously.
        start: What is wrong when it begins: "" or a key of `MENDER`.
        form: In which torchrun is called, one of `launcher.FORMS`.
    """

    places: tuple[str, ...]
    ranks: int = 1
    is_async: bool = False
    start: str = ""
    form: str = "standalone"

    def __str__(self) -> str:
        notes = [f"{self.ranks} ranks", self.form, "async" if self.is_async else "", self.start]
        return f"{', '.join(filter(None, notes))}: {' '.join(self.places)}"


def chains(seed: int = 5) -> list[Chain]:
    """Every place and action of the trainer, in jobs of a few kills each."""
    draw = random.Random(seed)
    tolerated: list[str] = []

    def places(
        writes: Mapping[str, tuple[str, ...]], actions: Sequence[str] = ACTIONS
    ) -> list[str]:
        """Those that end an attempt; the others are kept for the last attempt of some job."""
        found = []
        for name, positions in writes.items():
            for at, action in itertools.product(positions, actions):
                if (action, at) == ("enospc", "after"):
                    continue  # what is written is written
                nth = draw.randint(1, TRAINER.get(name, 1))
                place = f"{name.replace(' ', '_')}:{at}:{nth}:{action}"
                is_tolerated = action == "enospc" and name in TOLERATED
                (tolerated if is_tolerated else found).append(place)
        draw.shuffle(found)
        return found

    def jobs(found: Sequence[str], **how: Any) -> list[Chain]:
        """Kills in groups of nearly one size, what was tolerated last."""
        first = [place for place in found if place.startswith(FIRST)]
        last = [place for place in found if place.startswith(MENDED)]
        rest = [place for place in found if place not in (*first, *last)]
        count = max(len(first), len(last), -(-len(found) // CHAIN))
        ordered = [(*first[k::count], *rest[k::count], *last[k::count]) for k in range(count)]
        return [Chain(places, **how) for places in ordered]

    made = jobs(places({name: WRITES[name] for name in TRAINER}))
    made = [Chain((*job.places, *tolerated[k :: len(made)][:1])) for k, job in enumerate(made)]
    assert len(tolerated) <= len(made)
    tolerated.clear()
    kept = {name: MEGATRONS[name] for name in ("checkpoint", "tracker")}
    code = {name: at for name, at in MEGATRONS.items() if name not in kept}
    made += jobs(places(kept)) + jobs(places(kept), is_async=True)
    own = [f"{place}:{draw.randint(0, 1)}" for place in places(code, ("kill", "term"))]
    made += [
        replace(job, form=FORMS[k % len(FORMS)]) for k, job in enumerate(jobs(own, ranks=2))
    ]
    for start, names in MENDER.items():
        mending = jobs(places({name: WRITES[name] for name in names}), start=start)
        if start == "torn tracker":
            first = "tracker:middle:1:kill"
            mending = [replace(job, places=(first, *job.places)) for job in mending]
        mending = [
            replace(job, places=(*job.places, *tolerated[k :: len(mending)][:1]))
            for k, job in enumerate(mending)
        ]
        tolerated.clear()
        made += mending
    return made


def write_rollouts(path: Path) -> None:
    """What every job trains on."""
    write_batches(path, make_steps(BATCHES, seed=SEED))


def write_under_fire(path: Path) -> None:
    """The same batches from writers that die at every place of theirs, one after the other."""
    command = [sys.executable, "-m", "tests.reliability.writers_under_fire", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)


def run_flags(rollouts: Path, folder: Path) -> dict[str, object]:
    """Options of a run of its own in a folder, the same at every start."""
    return {
        "dynamic-global-batch": True,
        "rollout-path": rollouts,
        "rollouts-per-step": PER_STEP,
        "max-tokens-per-gpu": CAPACITY,
        "train-samples": TOTAL,
        "precision": "float32",
        "step-report": folder / "steps.jsonl",
        "rollout-ledger": folder / "ledger.jsonl",
        "save": folder / "checkpoints",
        "load": folder / "checkpoints",
        "save-interval": SAVE_INTERVAL,
        "keep-batches": 0,
    }


def prepare(rollouts: Path, folder: Path, chain: Chain) -> None:
    """What a job finds in its folder when it begins."""
    shutil.copytree(rollouts, folder / "rollouts")
    if chain.start == "torn ledger":
        (folder / "ledger.jsonl").write_text(_WHOLE_LINE + _TORN_LINE + _WHOLE_LINE)
    if chain.start == "leftovers":
        for _ in range(NUM_LEFTOVERS):
            (folder / "rollouts" / hidden_name()).mkdir()


def start(folder: Path, chain: Chain, *, restarts: int) -> int:
    """Start a job in its folder, or start it again; returns torchrun's exit code."""
    flags = run_flags(folder / "rollouts", folder)
    if chain.is_async:
        flags |= {"async-save": True, "use-persistent-ckpt-worker": True}
        flags |= {"async-strategy": "mcore"}
    done = torchrun(
        chain.form,
        "--monitor-interval=0.1",
        ROOT / "tests" / "reliability" / "killed_training.py",
        *Cell(chain.ranks, flags, Recipe(decay=TOTAL, warmup=4)).argv(),
        restarts=restarts,
        ranks=chain.ranks,
        environment={"KILLED_AT": " ".join([str(folder), *chain.places])},
    )
    with open(folder / "log", "a") as log:
        log.write(done.stdout[-20_000:] + done.stderr)
    return done.returncode


def run(rollouts: Path, folder: Path, chain: Chain) -> None:
    """A whole job, through real torchrun, in `folder`.

    Raises:
        AssertionError: It did not end well, or did not pass a place.
    """
    prepare(rollouts, folder, chain)
    code = start(folder, chain, restarts=len(chain.places))
    tail = (folder / "log").read_text()[-6000:]
    assert code == 0, f"{chain} ended with {code}:\n{tail}"
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


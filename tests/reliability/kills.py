"""Processes that end by SIGKILL at a chosen point of a real training, and what they left behind."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.parity.job import OWN_SCRIPT, Cell, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe
from tests.parity.rollouts import CAPACITY
from tests.pool import RankError

PER_STEP = 5
BATCHES = (12, 12)
TOTAL = sum(BATCHES)
NUM_STEPS = 6  # 5 + 5 + 2 rollouts of each batch
SAVE_INTERVAL = 2

# Point → how often it is passed at least, on every rank, before the run is over.
POINTS = {"read": 2, "forward": 6, "optimizer step": 6, "checkpoint write": 3, "hand-over": 3}


@dataclass(frozen=True)
class Kill:
    """Where a run dies.

    Attributes:
        point: One of `POINTS`.
        nth: At which passage.
        ranks: Which ranks die; the others are ended as a launcher does.
        mark: File that is made just before.
    """

    point: str
    nth: int
    ranks: tuple[int, ...]
    mark: str = ""

    def __str__(self) -> str:
        return f"{self.point} {self.nth}, ranks {self.ranks}"

    def __call__(self) -> None:
        """Set the trap on this rank, before the training begins."""
        if int(os.environ["RANK"]) in self.ranks:
            _TRAPS[self.point](self)


def random_kills(count: int, seed: int) -> list[Kill]:
    """Kills of all or one of two ranks, every point in turn."""
    draw = random.Random(seed)
    points = list(POINTS)
    return [
        Kill(
            points[number % len(points)],
            draw.randint(1, POINTS[points[number % len(points)]]),
            draw.choice([(0,), (1,), (0, 1)]),
        )
        for number in range(count)
    ]


def _die(kill: Kill) -> None:
    Path(kill.mark).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _trap(owner: Any, name: str, kill: Kill, *, after: bool = False) -> None:
    """Die at the nth call of an attribute, before or after it did its work."""
    function = getattr(owner, name)
    calls = 0

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill.nth and not after:
            _die(kill)
        result = function(*args, **kwargs)
        if calls == kill.nth:
            _die(kill)
        return result

    setattr(owner, name, counted)


def _in_read(kill: Kill) -> None:
    from megatron_dynbatch.rollouts import RolloutDirectory

    _trap(RolloutDirectory, "read", kill)


def _in_forward(kill: Kill) -> None:
    from megatron.core.models.gpt import GPTModel

    _trap(GPTModel, "forward", kill, after=True)


def _in_optimizer_step(kill: Kill) -> None:
    """Weights are changed; no counter is."""
    import torch

    _trap(torch.optim.AdamW, "step", kill, after=True)
    _trap(torch.optim.Adam, "step", kill, after=True)


def _in_checkpoint_write(kill: Kill) -> None:
    """All files are written; the tracker still names the checkpoint before."""
    from megatron.training import checkpointing

    _trap(checkpointing.dist_checkpointing, "save", kill, after=True)


def _in_hand_over(kill: Kill) -> None:
    from megatron_dynbatch.steps import Exchange

    _trap(Exchange, "compare", kill)


_TRAPS: dict[str, Callable[[Kill], None]] = {
    "read": _in_read,
    "forward": _in_forward,
    "optimizer step": _in_optimizer_step,
    "checkpoint write": _in_checkpoint_write,
    "hand-over": _in_hand_over,
}


def run_flags(rollouts: Path, folder: Path) -> dict[str, object]:
    """Options of a run of its own in a folder."""
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
        "save-interval": SAVE_INTERVAL,
    }


def run(rollouts: Path, folder: Path, layout: Layout, kill: Kill | None = None) -> None:
    """Train from the newest checkpoint in the folder, if there is one, to the end or to the kill.

    Raises:
        AssertionError: The run ended otherwise.
    """
    saved = folder / "checkpoints"
    is_resumed = (saved / "latest_checkpointed_iteration.txt").exists()
    flags = {
        **run_flags(rollouts, folder),
        "load": saved if is_resumed else None,
        **layout.flags(),
    }
    mark = folder / "killed"
    mark.unlink(missing_ok=True)
    recipe = Recipe(decay=TOTAL, warmup=4)
    cell = Cell(
        layout.ranks,
        flags,
        recipe,
        script=OWN_SCRIPT,
        overwrite_weights=not is_resumed,
        prepare=None if kill is None else replace(kill, mark=str(mark)),
    )
    try:
        run_cell(cell)
    except RankError:
        if not mark.exists():
            raise
    assert kill is None or mark.exists(), f"the run came to its end without passing {kill}"


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

"""Half an hour of the demo's training with random faults; then every rollout was trained once.

    SOAK_MINUTES=30 python -m tests.reliability.soak FOLDER

A writer process writes demonstrations of the demo's task with random delays, and is killed at
random, also while it writes. Two ranks train them with the stock script; they are killed at random
and started again from the last checkpoint. Now and then a batch that was not read yet is damaged:
training must end with an error that names the file, and goes on when the batch is whole again.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from examples.demo.runs import MAX_TOKENS_PER_GPU, MODEL
from megatron_dynbatch.handshake import write_planned
from megatron_dynbatch.rollouts import RolloutDirectory
from megatron_dynbatch.rollouts.flow import NoRoom, training_batch, wait_for_room
from megatron_dynbatch.steps.ledger import imbalance, read_ledger
from tests.pool import ROOT

NUM_RANKS = 2
MAX_AHEAD = 3
PER_STEP = 8
# A fault every so many seconds, on average; after a restart a step must have time to finish.
SECONDS_BETWEEN_FAULTS = 45.0


def write(path: Path, seed: int, stop: Path) -> None:
    """The writer's life: batches under keys, so that a writer after it goes on where it ended."""
    from examples.demo.task import write_demonstrations

    draw = random.Random()
    directory, number = RolloutDirectory(path), 0
    while directory.state(number + 1) == "present":  # the last one may be written again
        number += 1
    while not stop.exists():
        sizes = [random.Random(seed + number).randint(2, 20)]
        with tempfile.TemporaryDirectory() as folder:
            scratch = RolloutDirectory(folder)
            write_demonstrations(scratch, sizes, seed + number)
            samples = scratch.read(0, range(len(scratch.index(0))))
        while not stop.exists():
            try:
                wait_for_room(directory, number, MAX_AHEAD, timeout=1.0)
                break
            except NoRoom:
                pass
        time.sleep(draw.choice([0.0, 0.0, 0.2, 2.0]))
        write_planned(directory, samples, key=f"batch {number}")
        number += 1
    directory.finish()


class Soak:
    """Processes, faults and their count.

    Args:
        folder: Where everything goes; must be new.
        seed: Of faults and data.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.seed = seed
        self.draw = random.Random(seed)
        self.rollouts = RolloutDirectory(folder / "rollouts")
        self.stop = folder / "stop"
        self.happened: Counter[str] = Counter()
        self.whole: tuple[Path, bytes] | None = None  # a damaged file as it was
        self.writer = self._start_writer()
        self.trainer = self._start_trainer()

    def _start_writer(self) -> subprocess.Popen[bytes]:
        code = (
            "from pathlib import Path; from tests.reliability.soak import write; "
            f"write(Path({str(self.rollouts.path)!r}), {self.seed}, Path({str(self.stop)!r}))"
        )
        with (self.folder / "writer.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=log, stderr=log)

    def _start_trainer(self) -> subprocess.Popen[bytes]:
        saved = self.folder / "checkpoints"
        load = ["--load", str(saved)] if saved.exists() else []
        self.log = self.folder / f"training-{self.happened.total()}.log"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={NUM_RANKS}", "-m", "megatron_dynbatch.run", "--cpu", "--verbose",
            str(ROOT / "examples" / "pretrain_gpt_sft.py"), *MODEL, *load,
            "--lr", "1e-3", "--lr-decay-style", "constant", "--save", str(saved),
            "--save-interval", "3", "--dynamic-global-batch",
            "--rollout-path", str(self.rollouts.path), "--rollouts-per-step", str(PER_STEP),
            "--max-tokens-per-gpu", str(MAX_TOKENS_PER_GPU), "--agreement-timeout", "60",
            "--batch-timeout", "300", "--rollout-ledger", str(self.folder / "ledger.jsonl"),
            "--step-report", str(self.folder / "steps.jsonl"),
        ]  # fmt: skip
        with self.log.open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def run(self, seconds: float) -> None:
        """Train with faults for a time, then to the end of what was written.

        Raises:
            AssertionError: Something else than the planted faults went wrong.
        """
        end = time.monotonic() + seconds
        next_fault = time.monotonic() + SECONDS_BETWEEN_FAULTS
        while self.trainer.poll() != 0:
            now = time.monotonic()
            if now > end:
                self.stop.touch()
            elif now > next_fault:
                self.draw.choice([self.kill_writer, self.kill_trainer, self.damage, self.pause])()
                next_fault = now + self.draw.uniform(0.5, 1.5) * SECONDS_BETWEEN_FAULTS
            if self.writer.poll() not in (None, 0):
                self.writer = self._start_writer()
            if self.trainer.poll() not in (None, 0):
                self._after_failure()
                self.trainer = self._start_trainer()
            time.sleep(0.2)
        self.writer.wait(60)

    def kill_writer(self) -> None:
        """kill -9, wherever it is."""
        self.happened["writer killed"] += 1
        self.writer.kill()
        self.writer.wait()

    def kill_trainer(self) -> None:
        """kill -9 of the launcher and all ranks."""
        self.happened["training killed"] += 1
        _kill(self.trainer)

    def pause(self) -> None:
        """The writer stands still for a while."""
        self.happened["writer paused"] += 1
        self.writer.send_signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(1, 5))
        self.writer.send_signal(signal.SIGCONT)

    def damage(self) -> None:
        """Turn bits over in a part that training has not come to yet."""
        batch = training_batch(self.rollouts) + self.draw.randint(1, MAX_AHEAD)
        folder = self.rollouts.path / f"batch-{batch:08d}"
        parts = sorted(folder.glob("part-*")) if self.whole is None else []
        if not parts:
            return
        path = self.draw.choice(parts)
        content = path.read_bytes()
        self.whole = path, content
        place = self.draw.randrange(4, len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        self.happened["batch damaged"] += 1

    def _after_failure(self) -> None:
        """A failure is the kill, or the damage, and then names the file."""
        text = self.log.read_text(errors="replace")
        if self.whole is not None and str(self.whole[0]) in text:
            self.happened["damage found"] += 1
        elif self.trainer.returncode != -signal.SIGKILL:
            raise AssertionError(f"training failed by itself; see {self.log}\n{text[-3000:]}")
        if self.whole is not None:
            path, content = self.whole
            path.write_bytes(content)
            self.whole = None

    def close(self) -> None:
        """End what is still running."""
        for process in (self.writer, self.trainer):
            if process.poll() is None:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of a process and of all that it started; the launcher's ranks have own sessions."""
    started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(started, timeout=30)


def main() -> None:
    """Soak for SOAK_MINUTES, then check the ledger."""
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    soak = Soak(Path(sys.argv[1]), seed=int(os.environ.get("SOAK_SEED", "0")))
    try:
        soak.run(60 * minutes)
    finally:
        soak.close()
    num_batches = soak.rollouts.num_batches_if_finished()
    assert num_batches is not None, "the run was not closed"
    entries = read_ledger(soak.folder / "ledger.jsonl")
    wrong = imbalance(entries, soak.rollouts, num_batches)
    num_rollouts = sum(len(entry.consumed) for entry in entries)
    print(f"{num_batches} batches, {num_rollouts} rollouts, faults: {dict(soak.happened)}")
    if wrong:
        raise SystemExit("the ledger does not balance:\n" + "\n".join(wrong[:20]))
    print("the ledger balances: every rollout was trained exactly once")


if __name__ == "__main__":
    main()

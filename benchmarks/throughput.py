"""Tokens per second, end to end: padded batches, first-fit packing and ours, on real Megatron.

    python -m benchmarks.throughput [--layouts DP1,DP2,PP2] [--sets A,B]

Long-tailed lengths (the named sets, scaled to a sequence length that a CPU trains). Every iteration
trains the same samples in three arms, in changing order, by Megatron's own `train_step`:

  (i)    stock batches: no hooks, one sample a micro-batch, padded to the whole length as
         Megatron's own SFT dataset pads it, as a part of the sequence;
  (ii)   first-fit in arrival order, micro-batches to ranks by stride, padded with dummies;
  (iii)  ours: the package's plan, micro-batches of their own width.

All arms have the same model, attention and batches packed beforehand; wall time is taken between
barriers. fill is samples' tokens over tokens laid out, so tokens/s(i) / fill(i) is what the
hardware processes; the bar is 0.95 of that for ours, with pipelines times the ratio of the ideal
bubbles M/(M + PP − 1). Exit code 1 if it is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hook_overhead import REPOSITORY, VOCAB_SIZE, Swapped
from benchmarks.plan_baselines import first_fit_stride
from megatron_dynbatch import RolloutDirectory, Sample
from megatron_dynbatch.plan import padded_length
from megatron_dynbatch.plan.distributions import DISTRIBUTIONS, draw_lengths
from megatron_dynbatch.run import Launch, prepare, run_target

BAR = 0.95
SCRIPT = REPOSITORY / "examples" / "sft_varlen.py"
LAYOUTS: dict[str, tuple[int, int, Sequence[str]]] = {
    "DP1": (1, 1, ()),
    "DP2": (2, 1, ()),
    "PP2": (2, 2, ("--pipeline-model-parallel-size", "2")),
}
"""Processes, pipeline stages, Megatron's options."""

ARMS = ("stock", "first-fit", "ours")
WARM_UP = 1


def draw_samples(name: str, count: int, seq_length: int, seed: int) -> list[Sample]:
    """Samples with scaled lengths of a named set; the second half of each is trained."""
    scale = seq_length / DISTRIBUTIONS[name].capacity
    lengths = np.maximum(np.rint(draw_lengths(name, count, seed) * scale), 4).astype(int)
    draw = np.random.default_rng(seed)
    return [
        Sample(draw.integers(0, VOCAB_SIZE, n), int(n) // 2, rollout_id=i)
        for i, n in enumerate(lengths)
    ]


@dataclasses.dataclass
class Arm:
    """One step in one arm: laid-out tokens and micro-batches over all ranks, and seconds."""

    seconds: float
    laid_out: int
    num_microbatches: int


class Race:
    """Trains every step in all arms and keeps what they took.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[str, list[Arm]] = defaultdict(list)
        self.tokens: list[int] = []
        self._orders = itertools.cycle(itertools.permutations(ARMS))
        self._swapped = Swapped()

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `train_step`, once per arm; ours answers."""

        @functools.wraps(train_step)
        def run_all(
            forward_step: Any,
            data_iterator: Any,
            model: Any,
            optimizer: Any,
            scheduler: Any,
            config: Any,
            forward_backward: Any,
            **named: Any,
        ) -> Any:
            rest = (model, optimizer, scheduler, config)
            answer = None
            for arm in next(self._orders):
                step = self._step(arm)
                m = step.num_microbatches
                for k in range(m):
                    step.micro_batch(k)
                if arm == "stock":
                    iterator, own_step = self._stock_iterator(step), stock_forward_step()
                    with self._swapped.stock(m) as own_schedule:
                        arguments = (own_step, iterator, *rest, own_schedule)
                        self._timed(arm, step, train_step, *arguments, **named)
                else:
                    answer_of = self._with_step(step, train_step)
                    arguments = (forward_step, data_iterator, *rest, forward_backward)
                    result = self._timed(arm, step, answer_of, *arguments, **named)
                    answer = result if arm == "ours" else answer
            self.tokens.append(step.num_tokens)
            return answer

        return run_all

    def _step(self, arm: str) -> Any:
        """The open step as this arm cuts it."""
        from megatron_dynbatch.hooks.session import session
        from megatron_dynbatch.steps import Step

        run = session()
        assert run is not None and run.step is not None
        ours, plan = run.step, run.step.plan
        if arm == "ours":
            return ours
        options = self.options
        samples = draw_samples(options.set, options.samples, options.seq_length, ours.batch_id)
        lengths = padded_length(plan.index.total_lengths, plan.layout).tolist()
        rows, dp = ours.step_plan.samples.tolist(), plan.layout.dp
        if arm == "stock":
            ranks = [[[row] for row in rows[rank::dp]] for rank in range(dp)]
        else:
            packed = first_fit_stride([lengths[r] for r in rows], [], dp, options.seq_length)
            ranks = [[[rows[i] for i in mb] for mb in rank] for rank in packed]
        cut = tuple(tuple(map(tuple, rank)) for rank in ranks)
        step = dataclasses.replace(ours.step_plan, micro_batches=cut)
        steps = [step if i == ours.step_index else s for i, s in enumerate(plan.steps)]
        return Step(
            dataclasses.replace(plan, steps=tuple(steps)),
            ours.step_index,
            ours.batch_id,
            dp_rank=ours.dp_rank,
            cp_rank=ours.cp_rank,
            samples=dict(enumerate(samples)),
            width=options.seq_length if arm == "stock" else None,
            device=ours.device,
        )

    def _with_step(self, step: Any, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Train this step in the place of the open one."""
        from megatron_dynbatch.hooks.session import session

        def run_step(*positional: Any, **named: Any) -> Any:
            run = session()
            assert run is not None
            opened, run.step = run.step, step
            try:
                return train_step(*positional, **named)
            finally:
                run.step = opened

        return run_step

    def _stock_iterator(self, step: Any) -> Any:
        """Rows as Megatron's own SFT dataset makes them: padding belongs to the last sequence."""
        import torch
        from megatron.core.rerun_state_machine import RerunDataIterator

        whole = torch.tensor([[0, step.width]], dtype=torch.int32)
        rows = {
            "cu_seqlens": whole,
            "cu_seqlens_padded": whole,
            "max_seqlen": torch.tensor([step.width], dtype=torch.int32),
        }
        batches = [step.stock_batch(k) | rows for k in range(step.num_microbatches)]
        return RerunDataIterator(iter(batches))

    def _timed(
        self, arm: str, step: Any, run: Callable[..., Any], *positional: Any, **named: Any
    ) -> Any:
        import torch.distributed as dist

        dist.barrier()
        start = time.perf_counter()
        answer = run(*positional, **named)
        dist.barrier()
        seconds = time.perf_counter() - start
        self.found[arm].append(Arm(seconds, laid_out(step), step.num_microbatches))
        return answer


def laid_out(step: Any) -> int:
    """Tokens of all ranks' micro-batches, padding included."""
    lengths, width = step.plan.index.total_lengths, step.width
    micro_batches = [rows for rank in step.step_plan.micro_batches for rows in rank]
    return sum(width or max(int(lengths[list(rows)].sum()), 1) for rows in micro_batches)


def stock_forward_step() -> Any:
    """That of the unmodified script, which the running script has imported its model from."""
    return sys.modules["pretrain_gpt_sft"].forward_step


def megatron_arguments(options: argparse.Namespace, rollouts: Path) -> list[str]:
    """A small GPT."""
    seq_length, samples = str(options.seq_length), options.iterations + WARM_UP
    return [
        "--num-layers", "2", "--hidden-size", str(options.hidden), "--num-attention-heads", "4",
        "--position-embedding-type", "rope", "--max-position-embeddings", seq_length,
        "--seq-length", seq_length, "--attention-dropout", "0", "--hidden-dropout", "0",
        "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
        "--untie-embeddings-and-output-weights", "--tokenizer-type", "NullTokenizer",
        "--vocab-size", str(VOCAB_SIZE), "--lr", "1e-5", "--lr-decay-style", "constant",
        "--train-samples", str(samples * options.samples), "--eval-iters", "0",
        "--log-interval", "1", "--dynamic-global-batch", "--rollout-path", str(rollouts),
        "--rollouts-per-step", "batch", "--max-tokens-per-gpu", seq_length,
        "--micro-batch-width", "variable", *LAYOUTS[options.layout][2],
    ]  # fmt: skip


def work(options: argparse.Namespace) -> None:
    """One rank: train, and on rank 0 write what was found."""
    prepare(cpu=True)
    import torch.distributed as dist
    from megatron.training import training

    race = Race(options)
    training.train_step = race.around(training.train_step)
    arguments = megatron_arguments(options, options.folder / "rollouts")
    run_target(Launch(str(SCRIPT), False, tuple(arguments), cpu=True))
    if dist.get_rank() == 0:
        found = {arm: list(map(dataclasses.asdict, runs)) for arm, runs in race.found.items()}
        result = json.dumps({"tokens": race.tokens, "found": found})
        (options.folder / "result.json").write_text(result)


def race(layout: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One layout and set in processes of its own."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rollouts = RolloutDirectory(folder / "rollouts")
        for batch in range(options.iterations + WARM_UP):
            rollouts.write(draw_samples(name, options.samples, options.seq_length, batch))
        rollouts.finish()
        sizes = ("iterations", "samples", "seq_length", "hidden")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={LAYOUTS[layout][0]}", "-m", "benchmarks.throughput",
            "--worker", "--layout", layout, "--set", name, "--folder", place,
            *(f"--{size.replace('_', '-')}={getattr(options, size)}" for size in sizes),
        ]  # fmt: skip
        run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{layout}, set {name} failed:\n{run.stderr[-4000:]}")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result


def show(layout: str, name: str, result: dict[str, Any]) -> bool:
    """Print the lines of one run; whether the bar holds."""
    tokens = np.array(result["tokens"])[WARM_UP:]
    columns = {
        arm: {key: np.array([run[key] for run in runs])[WARM_UP:] for key in runs[0]}
        for arm, runs in result["found"].items()
    }
    stages = LAYOUTS[layout][1]
    bubble = {a: c["num_microbatches"] / (c["num_microbatches"] + stages - 1)
              for a, c in columns.items()}  # fmt: skip
    stock = columns["stock"]
    hardware = stock["laid_out"] / stock["seconds"]
    ratios = {}
    for arm in ARMS:
        speed = tokens / columns[arm]["seconds"]
        ratio = statistics.median(speed / (hardware * bubble[arm] / bubble["stock"]))
        ratios[arm] = ratio
        fill = statistics.median(tokens / columns[arm]["laid_out"])
        print(f"| {layout} | {name} | {arm} | {statistics.median(speed):.0f} | {fill:.3f} "
              f"| {statistics.median(columns[arm]['num_microbatches']):.0f} "
              f"| {ratio:.3f} |", flush=True)  # fmt: skip
    return ratios["ours"] >= BAR


def main() -> int:
    """Run all layouts and sets, or one rank of one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--sets", default="A,B")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    for hidden in ("--worker", "--layout", "--set", "--folder"):
        kind: dict[str, Any] = {"action": "store_true"} if hidden == "--worker" else {}
        parser.add_argument(hidden, help=argparse.SUPPRESS, **kind)
    options = parser.parse_args()
    if options.worker:
        options.folder = Path(options.folder)
        work(options)
        return 0
    print("| layout | set | arm | tokens/s | fill | M | of tokens/s(i) / fill(i) and bubbles |")
    print("|---|---|---|---|---|---|---|")
    met = [
        show(layout, name, race(layout, name, options))
        for layout in options.layouts.split(",")
        for name in options.sets.split(",")
    ]
    verdict = "met" if all(met) else "MISSED"
    print(f"\nours at least {BAR} of what the hardware processes: {verdict}")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What the plugin costs per step: fixed batches in stock Megatron, and the same through the plugin.

    python -m benchmarks.hook_overhead

Two trainings with the real `megatron.training.pretrain` and the unmodified script
`examples/pretrain_gpt_sft.py`, on the CPU: a larger model for the ratio, and one so small that
microseconds are not lost in the noise. Every iteration runs Megatron's `train_step` three
times, in changing order: stock (hooks uninstalled, Megatron's own calculator, batches made
beforehand), plugin, and stock again. Stock against stock is the noise floor. What the plugin does
between steps (opening, counting, reporting) is timed apart and added to its arm.

CPU time is that of the training's own thread, so a busy machine hardly changes it; packing runs in
a thread of its own and is a row of its own. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import io
import itertools
import pstats
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynbatch import RolloutDirectory, Sample
from megatron_dynbatch.run import Launch, prepare, run_target

RATIO_BAR = 1.01
MICROSECONDS_BAR = 200.0
REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = REPOSITORY / "examples" / "pretrain_gpt_sft.py"
VOCAB_SIZE = 127
SAMPLES_PER_MICRO_BATCH = 8
STEPS_PER_BATCH = 8
LARGER = {"layers": 4, "hidden": 128, "seq_length": 512, "iterations": 20}
SMALLER = {"layers": 1, "hidden": 32, "seq_length": 256, "iterations": 120}
WARM_UP = 3
"""Iterations that are not counted."""

type Times = tuple[float, float]
"""Wall and CPU seconds."""


class Contest:
    """Runs every training step in all arms and keeps their times.

    Args:
        num_microbatches: M of every step.
        profiled: Iterations at the end whose plugin arm runs under the profiler, untimed.
    """

    def __init__(self, num_microbatches: int, iterations: int, profiled: int) -> None:
        self.num_microbatches = num_microbatches
        self.iterations = iterations
        self.profiled = profiled
        self.times: dict[str, list[Times]] = defaultdict(list)
        self.between: list[Times] = []
        self.packing: list[float] = []
        self.profile = cProfile.Profile()
        self._orders = itertools.cycle(itertools.permutations(("stock", "plugin", "stock again")))
        self._between = np.zeros(2)
        self._swapped = Swapped()

    def around(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `train_step`, once per arm; the plugin's answer counts."""

        @functools.wraps(train_step)
        def run_all(
            forward_step_func: Any,
            data_iterator: Any,
            model: Any,
            optimizer: Any,
            scheduler: Any,
            config: Any,
            forward_backward: Any,
            **named: Any,
        ) -> Any:
            rest = (model, optimizer, scheduler, config)
            batches = self._stock_batches()
            self.between.append((self._between[0], self._between[1]))
            self._between[:] = 0
            iteration = len(self.between) - 1
            if iteration >= WARM_UP + self.iterations:
                self.profile.enable()
                answer = train_step(forward_step_func, data_iterator, *rest, forward_backward)
                self.profile.disable()
                return answer
            for arm in next(self._orders):
                if arm == "plugin":
                    arguments = (data_iterator, *rest, forward_backward)
                    answer = self._timed(arm, train_step, forward_step_func, *arguments, **named)
                else:
                    with self._swapped.stock(self.num_microbatches) as own_schedule:
                        arguments = (batches(), *rest, own_schedule)
                        self._timed(arm, train_step, forward_step_func, *arguments, **named)
            return answer

        return run_all

    def _timed(self, arm: str, run: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        wall, cpu = time.perf_counter(), time.thread_time()
        answer = run(*positional, **named)
        self.times[arm].append((time.perf_counter() - wall, time.thread_time() - cpu))
        return answer

    def _stock_batches(self) -> Callable[[], Any]:
        """The open step's micro-batches as a stock iterator; also waits until all are packed."""
        from megatron.core.rerun_state_machine import RerunDataIterator

        from megatron_dynbatch.hooks.session import session

        run = session()
        assert run is not None and run.step is not None
        assert run.step.num_microbatches == self.num_microbatches
        made = [run.step.stock_batch(k) for k in range(self.num_microbatches)]
        # The next step's packing must not fall into any arm.
        run.feed._packer.submit(bool).result()
        return lambda: RerunDataIterator(iter([dict(batch) for batch in made]))

    def watch_between(self) -> None:
        """Time the handlers that run between steps."""
        from megatron.training import training

        handlers = training.__dict__["__dynbatch_sites__"]
        for name in ("loop condition", "logged batch size", "consumed samples"):
            handlers[name] = self._timed_handler(handlers[name])

    def _timed_handler(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(handler)
        def timed(*positional: Any) -> Any:
            start = np.array([time.perf_counter(), time.thread_time()])
            answer = handler(*positional)
            self._between += np.array([time.perf_counter(), time.thread_time()]) - start
            return answer

        return timed

    def watch_packing(self) -> None:
        """Time what the packing thread does for one micro-batch."""
        from megatron_dynbatch.steps.step import Step

        make = Step._make_on_host

        def timed(step: Step, k: int) -> Any:
            start = time.thread_time()
            answer = make(step, k)
            self.packing.append(time.thread_time() - start)
            return answer

        Step._make_on_host = timed  # type: ignore[method-assign]


class Swapped:
    """Everything that `install` changed in Megatron: as it was, and as it is now.

    Putting hooks in place anew for every step would leave them cold, which a training never sees.
    """

    def __init__(self) -> None:
        from megatron_dynbatch.hooks import seams, sites

        self._places = [
            (*seams._owner(seam), stock, ours) for seam, (stock, ours) in seams._INSTALLED.items()
        ] + [(f, "__code__", swap.original, swap.ours) for f, swap in sites._INSTALLED.items()]
        assert self._places, "the hooks are not installed yet"

    @contextlib.contextmanager
    def stock(self, num_microbatches: int) -> Iterator[Callable[..., Any]]:
        """Megatron without any hook; gives its own schedule."""
        from megatron.core import num_microbatches_calculator as calculators
        from megatron.core.pipeline_parallel import get_forward_backward_func

        ours = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        constant = calculators.ConstantNumMicroBatchesCalculator(num_microbatches, 1, 1, False, 0)
        calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR = constant
        for owner, name, stock, _ in self._places:
            setattr(owner, name, stock)
        try:
            yield get_forward_backward_func()
        finally:
            calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR = ours
            for owner, name, _, hooked in self._places:
                setattr(owner, name, hooked)


def write_rollouts(path: Path, num_steps: int, per_step: int, seq_length: int) -> None:
    """Samples that fill micro-batches exactly; three of four tokens are trained."""
    draw = np.random.default_rng(0)
    length = seq_length // SAMPLES_PER_MICRO_BATCH
    rollouts = RolloutDirectory(path)
    for first in range(0, num_steps, STEPS_PER_BATCH):
        steps = min(STEPS_PER_BATCH, num_steps - first)
        rollouts.write(
            [
                Sample(draw.integers(0, VOCAB_SIZE, length), 3 * length // 4, rollout_id=i)
                for i in range(steps * per_step)
            ]
        )
    rollouts.finish()


def megatron_arguments(options: argparse.Namespace, rollouts: Path, report: Path) -> list[str]:
    """A small GPT, large enough that a micro-batch is real work."""
    per_step = options.micro_batches * SAMPLES_PER_MICRO_BATCH
    samples = (WARM_UP + options.iterations + options.profiled) * per_step
    return [
        "--num-layers", str(options.layers), "--hidden-size", str(options.hidden),
        "--num-attention-heads", "4",
        "--seq-length", str(options.seq_length), "--position-embedding-type", "rope",
        "--max-position-embeddings", str(options.seq_length),
        "--attention-dropout", "0", "--hidden-dropout", "0", "--normalization", "RMSNorm",
        "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
        "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE),
        "--lr", "1e-5", "--lr-decay-style", "constant", "--train-samples", str(samples),
        "--eval-iters", "0", "--log-interval", "1", "--step-report", str(report),
        "--dynamic-global-batch", "--rollout-path", str(rollouts),
        "--rollouts-per-step", str(per_step), "--max-tokens-per-gpu", str(options.seq_length),
    ]  # fmt: skip


def compete(options: argparse.Namespace) -> Contest:
    """Train once; what every arm took."""
    prepare(cpu=True)
    from megatron.training import training

    contest = Contest(options.micro_batches, options.iterations, options.profiled)
    training.train_step = contest.around(training.train_step)
    contest.watch_between()
    contest.watch_packing()
    num_steps = WARM_UP + options.iterations + options.profiled
    with tempfile.TemporaryDirectory() as folder:
        rollouts = Path(folder) / "rollouts"
        per_step = options.micro_batches * SAMPLES_PER_MICRO_BATCH
        write_rollouts(rollouts, num_steps, per_step, options.seq_length)
        arguments = megatron_arguments(options, rollouts, Path(folder) / "steps.jsonl")
        with contextlib.redirect_stdout(io.StringIO()):
            run_target(Launch(str(SCRIPT), False, tuple(arguments), cpu=True))
    return contest


def show(contest: Contest) -> tuple[float, float]:
    """Print the table; ratio and microseconds per micro-batch of the median CPU time."""
    m = contest.num_microbatches
    stock, plugin, again = (
        np.array(contest.times[arm])[WARM_UP:] for arm in ("stock", "plugin", "stock again")
    )
    between = np.array(contest.between)[WARM_UP : WARM_UP + len(plugin)]
    print(f"{len(stock)} iterations of {m} micro-batches; times per micro-batch")
    print(f"{'':18}{'stock ms':>10}{'plugin/stock':>14}{'stock/stock':>13}{'plugin us':>11}"
          f"{'of it between steps':>21}{'stock-stock us':>16}")  # fmt: skip
    figures = 1.0, 0.0
    for name, column, pick in (
        ("wall, median", 0, statistics.median),
        ("CPU, median", 1, statistics.median),
        ("CPU, 10 % quantile", 1, functools.partial(np.quantile, q=0.1)),
    ):
        apart = pick(between[:, column])
        first, second = pick(stock[:, column]), pick(again[:, column])
        ours = pick(plugin[:, column]) + apart
        extra = (ours - (first + second) / 2) / m * 1e6
        ratio, null = ours / first, second / first
        if name == "CPU, median":  # each iteration against itself: load that drifts drops out
            ratio = pick((plugin + between)[:, column] / stock[:, column])
            null = pick(again[:, column] / stock[:, column])
            pairs = (plugin + between - (stock + again) / 2)[:, column]
            extra = pick(pairs) / m * 1e6
            figures = ratio, extra
        print(f"{name:18}{first / m * 1e3:10.2f}{ratio:14.4f}{null:13.4f}{extra:11.0f}"
              f"{apart / m * 1e6:21.0f}{(second - first) / m * 1e6:16.0f}")  # fmt: skip
    packing = statistics.median(contest.packing) * 1e6
    print(f"packing, in its own thread: {packing:.0f} us CPU per micro-batch")
    return figures


def show_profile(contest: Contest, lines: int = 14) -> None:
    """The plugin's functions inside `train_step`, by their own time and what they call."""
    runs = contest.profiled * contest.num_microbatches
    rows = []
    stats: Any = pstats.Stats(contest.profile)
    for (file, line, function), (_, calls, own, total, _) in stats.stats.items():
        if "megatron_dynbatch/" in file and "/cpu/" not in file:
            place = f"{file.rpartition('megatron_dynbatch/')[2]}:{line} {function}"
            rows.append((total, own, calls, place))
    print(f"\nprofile of {contest.profiled} plugin steps (the profiler itself adds to every call)")
    print(f"{'us/micro-batch':>15}{'own':>8}{'calls':>8}")
    for total, own, calls, place in sorted(rows, reverse=True)[:lines]:
        if not place.startswith("hooks/loss.py") or "run_schedule" not in place:
            print(f"{total / runs * 1e6:15.0f}{own / runs * 1e6:8.0f}{calls / runs:8.2f}  {place}")


def measure(options: argparse.Namespace) -> tuple[float, float]:
    """Train one model and print; ratio, and microseconds per micro-batch."""
    contest = compete(options)
    figures = show(contest)
    show_profile(contest)
    return figures


def main() -> int:
    """Measure both models, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hook_overhead")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--profiled", type=int, default=8)
    options = parser.parse_args()
    figures = []
    for model in (LARGER, SMALLER):
        print(f"\n{model['layers']} layers of {model['hidden']}, {model['seq_length']} tokens")
        # A process of its own: Megatron is set up once in each.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
            both = argparse.Namespace(**vars(options), **model)
            figures.append(executor.submit(measure, both).result())
    (ratio, _), (_, extra) = figures
    met = ratio <= RATIO_BAR and extra <= MICROSECONDS_BAR
    print(
        f"\nmedian CPU time: ratio {ratio:.4f} with the larger model (bar {RATIO_BAR}), "
        f"{extra:.0f} us per micro-batch with the smaller one (bar {MICROSECONDS_BAR:.0f}): "
        f"{'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

"""Reductions on one CPU thread, forward and backward: loop, index_add, x @ w and ours, in one run.

    python -m benchmarks.reduce_cpu [--quick] [--out FILE]

The contenders take turns, so that a busy machine slows all of them alike; the table shows the
fastest of each one's runs, and ratios to plain `x @ w`. Launches of the kernels are counted through
the function that launches them, calls of the torch implementation through a dispatch mode.
"""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dynbatch.reduce import (
    host_sums,
    kernels,
    reference,
    segment_sums,
    segment_table,
    weighted_sums,
)

SAMPLES, TOKENS, VALUES = (8, 64, 256), (6144, 49152, 196608), (1, 8)
BAR_SHAPE = (256, 6144, 8)


class Case:
    """One shape: B samples of T tokens together, K values, half of all tokens trained."""

    def __init__(self, num_samples: int, num_tokens: int, num_values: int) -> None:
        generator = torch.Generator().manual_seed(0)
        cuts = torch.randperm(num_tokens - 1, generator=generator)[: num_samples - 1] + 1
        edges = [0, *cuts.sort().values.tolist(), num_tokens]
        self.lengths = [b - a for a, b in zip(edges, edges[1:], strict=False)]
        mask = torch.randint(0, 2, (num_tokens,), generator=generator).float()
        self.masks = list(mask.split(self.lengths))
        self.x = torch.randn(num_values, num_tokens, generator=generator, requires_grad=True)
        denoms = torch.tensor([max(m.sum().item(), 1) for m in self.masks], dtype=torch.float64)
        self.samples = torch.repeat_interleave(
            torch.arange(num_samples), torch.tensor(self.lengths)
        )
        self.w = mask.double() / denoms[self.samples]
        self.w32 = self.w.float()
        # A response starts after its sample's first token: here every token is one of a response.
        self.table = segment_table([n + 1 for n in self.lengths], self.lengths, layout="response")

    def loop(self) -> Tensor:
        """Per sample and value, as trainers write it."""
        totals = []
        for row in self.x:
            parts = zip(row.split(self.lengths), self.masks, strict=True)
            totals.append(sum((v * m).sum() / torch.clamp_min(m.sum(), 1) for v, m in parts))
        return torch.stack(totals)

    def index_add(self) -> Tensor:
        """Per-sample sums by index_add, in float32."""
        sums = self.x.new_zeros(self.x.shape[0], len(self.lengths))
        return sums.index_add(1, self.samples, self.x * self.w32).sum(1)

    def index_add_safe(self) -> Tensor:
        """The same with what ours gives: float64, masked positions selected away."""
        terms = torch.where(self.w != 0, self.x, 0.0) * self.w
        sums = terms.new_zeros(self.x.shape[0], len(self.lengths))
        return sums.index_add(1, self.samples, terms).sum(1)

    def plain(self) -> Tensor:
        """x @ w in float32: neither NaN-safe nor float64."""
        return self.x @ self.w32

    def ours(self) -> Tensor:
        """weighted_sums."""
        return weighted_sums(self.x, self.w)

    def ours_per_sample(self) -> Tensor:
        """The per-sample sums of segment_sums, differentiated."""
        return segment_sums(self.x, self.w, self.table)[1].sum(1)


NAMES = ("plain", "ours", "ours_per_sample", "index_add", "index_add_safe", "loop")
TITLES = {
    "ours": "ours",
    "ours_per_sample": "ours, per sample",
    "index_add": "index_add",
    "index_add_safe": "index_add, NaN-safe float64",
    "loop": "loop",
}
HEAD = [
    "# Reductions on a CPU",
    "",
    "Written by `python -m benchmarks.reduce_cpu --out benchmarks/results/cpu.md`: one thread of "
    f"a machine with {os.cpu_count()} cores and no GPU, torch {torch.__version__}. Forward and "
    "backward, the fastest of each one's runs, taken in turns; columns after x @ w are ratios to "
    "it. x @ w and index_add run in float32 and let NaN through, ours and the other index_add "
    "accumulate in float64 and select masked positions away.",
    "",
]


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Fastest forward and backward of each contender, in seconds."""
    best = dict.fromkeys(NAMES, float("inf"))
    for turn in range(rounds):
        for name in NAMES:
            if name == "loop" and turn >= max(2, rounds // 50):
                continue
            function: Callable[[], Tensor] = getattr(case, name)
            case.x.grad = None
            start = time.perf_counter()
            function().sum().backward()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


class CallCounter(TorchDispatchMode):
    """Counts the torch calls made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.count += 1
        return func(*args, **(kwargs or {}))


def torch_calls(function: Callable[..., object], *arguments: object) -> int:
    """Torch calls that one run of a function makes."""
    with CallCounter() as counter:
        function(*arguments)
    return counter.count


def launches(case: Case) -> dict[str, int]:
    """Kernel launches of each operator, counted without running them."""
    counted: list[str] = []
    launch, kernels.launch = kernels.launch, lambda name, *_: counted.append(name)
    x, w = case.x.detach(), case.w
    pieces, count = case.table.on(torch.device("cpu")).pieces, case.table.num_samples
    grad, per_sample = w.new_ones(len(x)), w.new_ones(len(x), count)
    result = {}
    for name, arguments in {
        "weighted_sums": (x, w),
        "weighted_sums_backward": (grad, w, x.dtype),
        "segment_sums": (x, w, pieces, None, count),
        "segment_sums_backward": (grad, per_sample, w, pieces, None, x.dtype),
    }.items():
        counted.clear()
        getattr(kernels, name)(*arguments)
        result[name] = len(counted)
    kernels.launch = launch
    return result


def counts(case: Case) -> list[str]:
    """Rows: launches of the kernels and calls of the torch implementation."""
    x, w, stretches = case.x.detach(), case.w, case.table.stretches
    grad, per_sample = w.new_ones(len(x)), w.new_ones(len(x), case.table.num_samples)
    calls = {
        "weighted_sums": torch_calls(reference.weighted_sums, x, w),
        "weighted_sums_backward": torch_calls(reference.weighted_sums_backward, grad, w, x.dtype),
        "segment_sums": torch_calls(
            host_sums.segment_sums, x, w, stretches, case.table.num_samples
        ),
        "segment_sums_backward": torch_calls(
            host_sums.segment_sums_backward, grad, per_sample, w, stretches, x.dtype
        ),
    }
    rows = ["| operator | kernel launches | torch calls on the host |", "|---|---|---|"]
    return rows + [
        f"| {name} | {count} | {calls[name]} |" for name, count in launches(case).items()
    ]


def main() -> None:
    """Prints the tables and the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the shape of the bar only")
    parser.add_argument("--out", type=Path, help="write the tables there too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [(b, t, k) for t in TOKENS for b in SAMPLES for k in VALUES]
    lines = ["| B | T | K | x @ w, µs | " + " | ".join(TITLES[name] for name in NAMES[1:]) + " |"]
    lines.append("|" + "---|" * (len(NAMES) + 3))
    print("\n".join(lines))
    for shape in [BAR_SHAPE] if options.quick else shapes:
        rounds = max(20, 3_000_000 // (shape[1] * shape[2]))
        case = Case(*shape)
        best = measure(case, rounds)
        ratios = [f"{best[name] / best['plain']:.1f}×" for name in NAMES[1:]]
        cells = [*map(str, shape), f"{best['plain'] * 1e6:.0f}", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        if shape == BAR_SHAPE:
            bar = (
                f"Bar at B={shape[0]}, T={shape[1]}, K={shape[2]}: "
                f"{best['ours'] / best['plain']:.2f} × x @ w (at most 4), "
                f"{best['loop'] / best['ours']:.0f} × faster than the loop (at least 250), "
                f"{best['index_add'] / best['ours']:.2f} × index_add's speed (at least 1)."
            )
            counted = counts(case)
    rest = ["", bar, "", *counted]
    print("\n".join(rest))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("\n".join([*HEAD, *lines, *rest]) + "\n")


if __name__ == "__main__":
    main()

"""Log-prob and entropy on one CPU thread: bytes and memory per logit, and time, side by side.

    python -m benchmarks.logprob_bytes [--rows 512] [--vocab 32768] [--rounds 7] [--kernel]

Each contender runs forward and backward from the same logits. Bytes are counted per torch operation
(`traffic.py`): in all, and those that miss a cache of 8 MB. Memory is the peak beside the logits
(`allocations.py`). CPU time is process time; contenders take turns, and the table shows medians as
ratios to plain torch. --kernel adds the bytes of the CUDA kernels, counted by the host emulator
(needs g++).
"""

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.allocations import peak_bytes
from benchmarks.traffic import count_traffic
from megatron_dynbatch.logprob import function, ops, vocab_parallel_logprob_entropy

Run = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]


def plain(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """torch.log_softmax, and the entropy from it."""
    log_p = torch.log_softmax(logits.float(), -1)
    with torch.set_grad_enabled(with_gradient):
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def megatron(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """Megatron's vocabulary-parallel cross entropy, and the entropy beside it."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = logits.float()
    with torch.set_grad_enabled(with_gradient):
        p = torch.softmax(logits, -1)
        entropy = torch.logsumexp(logits, -1) - (p * logits).sum(-1)
    # It overwrites float32 logits, which the entropy's gradient (or the model) still needs.
    loss = vocab_parallel_cross_entropy(
        logits.clone()[:, None], targets[:, None], 0.0, dist.group.WORLD
    )
    return -loss[:, 0], entropy


def ours(logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor]:
    """vocab_parallel_logprob_entropy, gradient in the memory of the logits."""
    logp, entropy = vocab_parallel_logprob_entropy(
        logits, targets, entropy="grad" if with_gradient else "metric", inplace_backward=True
    )
    assert entropy is not None
    return logp, entropy


CONTENDERS: dict[str, Run] = {
    "torch log_softmax + entropy": plain,
    "Megatron's cross entropy + entropy": megatron,
    "ours, torch reference": ours,
}


def run(contender: Run, leaf: Tensor, targets: Tensor, with_gradient: bool) -> Callable[[], Tensor]:
    """Forward and backward from fresh logits, which are made here, outside of what is measured."""
    logits = leaf.clone().requires_grad_().view_as(leaf)  # not a leaf: it may be written to

    def both() -> Tensor:
        logp, entropy = contender(logits, targets, with_gradient)
        loss = logp.sum() + (0.1 * entropy.sum() if with_gradient else 0.0)
        return torch.autograd.grad(loss, logits)[0]

    return both


def reference_operators() -> SimpleNamespace:
    """Our operators as plain functions, so that the counter sees inside them."""
    return SimpleNamespace(**ops.TORCH)


def measure(leaf: Tensor, targets: Tensor, with_gradient: bool, rounds: int) -> list[str]:
    """Table rows of all contenders."""
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, contender in CONTENDERS.items():
            both = run(contender, leaf, targets, with_gradient)
            start = time.process_time()
            both()
            times[name].append(time.process_time() - start)
    plain_time = statistics.median(times["torch log_softmax + entropy"])
    rows = []
    for name, contender in CONTENDERS.items():
        registered, function.OPS = function.OPS, reference_operators()
        both = run(contender, leaf, targets, with_gradient)
        counted = count_traffic(both)
        function.OPS = registered
        peak = peak_bytes(run(contender, leaf, targets, with_gradient))
        cells = [
            str(leaf.dtype).removeprefix("torch."), "yes" if with_gradient else "no", name,
            *[f"{n / leaf.numel():.1f}" for n in (counted.missed, counted.total)],
            f"{peak / leaf.numel():.2f}", f"{statistics.median(times[name]) / plain_time:.2f}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def kernel_bytes(width: int) -> list[str]:
    """Table rows of the CUDA kernels, from the host emulator."""
    from megatron_dynbatch.logprob import kernels
    from megatron_dynbatch.reduce import kernels as launcher
    from tests.reduce.emulator.emulator import Emulator

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        emulator = Emulator(Path(folder), only="logprob")
        launcher.launch = emulator.launch
        for dtype in kernels.DTYPES:
            logits, targets = torch.randn(4, width).to(dtype), torch.arange(4)
            local = kernels.statistics(logits, targets, None, width, 1.0, True)
            saved = kernels.combine(local[None], None, 1.0)[2]
            slopes = torch.ones(4), torch.ones(4)
            kernels.backward(logits, targets, None, saved, *slopes, width, 1.0, logits)
            read, written, _ = emulator.take_traffic()
            cells = [str(dtype).removeprefix("torch."), "yes", "ours, CUDA kernels (emulated)"]
            cells += [f"{(read + written) / logits.numel():.1f}"] * 2 + ["", ""]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def liger() -> str:
    """Whether liger-kernel can take part."""
    try:
        importlib.import_module("liger_kernel.ops.cross_entropy")
    except ImportError as error:
        return f"liger-kernel does not take part: {error}"
    return "liger-kernel imports, but its kernels need a GPU: see `make gpu-check`"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--rows", 512), ("--vocab", 32_768), ("--rounds", 7)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--kernel", action="store_true", help="bytes of the CUDA kernels too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        print(
            "| logits | entropy's gradient | contender | B per logit past the cache | B in all "
            "| peak B beside the logits | CPU time ÷ log_softmax |\n" + "|" + "---|" * 7
        )
        for dtype in (torch.float32, torch.bfloat16):
            leaf = (torch.randn(options.rows, options.vocab) * 2).to(dtype)
            targets = torch.randint(options.vocab, (options.rows,))
            for with_gradient in (False, True):
                rows = measure(leaf, targets, with_gradient, options.rounds)
                print("\n".join(rows), flush=True)
        if options.kernel:
            print("\n".join(kernel_bytes(38_016)))
        print(f"\n{liger()}")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

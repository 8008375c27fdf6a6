"""Log-prob and entropy on a GPU: checks against float64, then time, bandwidth and memory.

Called by `gpu_check.py`. On another device ("cpu") the checks run on the torch reference, which
checks this file and nothing else.
"""

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.reduce_gpu_table import microseconds
from megatron_dynbatch.logprob import vocab_parallel_logprob_entropy

# (rows, width, columns that count)
SHAPES = [(0, 64, 64), (5, 1, 1), (7, 4099, 4099), (33, 50_257, 50_257), (64, 38_016, 37_900)]


def inputs(
    device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with NaN in masked rows, −inf here and there, targets and mask."""
    num_rows, width, columns = shape
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, width, generator=generator) * 4
    targets = torch.randint(columns, (num_rows,), generator=generator)
    forbidden = torch.rand(num_rows, width, generator=generator) < 0.3
    forbidden[torch.arange(num_rows), targets] = False
    logits.masked_fill_(forbidden, -torch.inf)
    mask = torch.rand(num_rows, generator=generator) < 0.7
    logits[~mask] = torch.nan
    logits[:, columns:] = torch.nan
    return logits.to(dtype).to(device), targets.to(device), mask.to(device)


def right(
    logits: Tensor, targets: Tensor, mask: Tensor, columns: int, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and the gradient of their sum, float64 on the CPU; 0 where masked."""
    x = logits.cpu().double().where(mask.cpu()[:, None], 0.0).requires_grad_()
    log_p = torch.log_softmax(x[:, :columns] / temperature, -1)
    finite = log_p.where(log_p.isfinite(), 0.0)
    entropy = -(log_p.exp() * finite).sum(-1)
    logp = log_p.gather(1, targets.cpu()[:, None])[:, 0]
    logp, entropy = (v.where(mask.cpu(), 0.0) for v in (logp, entropy))
    (grad,) = torch.autograd.grad(logp.sum() + entropy.sum(), x)
    return logp.detach(), entropy.detach(), grad


def both_ways(
    leaf: Tensor, targets: Tensor, mask: Tensor | None, columns: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and gradient by ours, gradient in place."""
    logits = leaf.clone().requires_grad_().view_as(leaf)
    logp, entropy = vocab_parallel_logprob_entropy(
        logits, targets, mask=mask, temperature=temperature, entropy="grad", vocab_size=columns,
        inplace_backward=True,
    )  # fmt: skip
    assert entropy is not None
    (grad,) = torch.autograd.grad(logp.sum() + entropy.sum(), logits)
    return logp.detach(), entropy.detach(), grad


def check(device: torch.device, small: bool = False) -> int:
    """Every shape and type against float64, and twice the same bits; returns how many."""
    count = 0
    for shape in SHAPES[: 3 if small else None]:
        for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
            for temperature in (1.0, 0.7):
                leaf, targets, mask = inputs(device, shape, dtype, seed=count)
                got = both_ways(leaf, targets, mask, shape[2], temperature)
                again = both_ways(leaf, targets, mask, shape[2], temperature)
                assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "bits"
                expected = right(leaf, targets, mask, shape[2], temperature)
                bounds = (1e-5, 1e-6), (1e-5, 1e-6), (2e-6, rounding)
                for a, b, (atol, rtol) in zip(got, expected, bounds, strict=True):
                    torch.testing.assert_close(
                        a.cpu().double(), b, atol=atol, rtol=rtol, msg=f"{shape} {dtype}"
                    )
                count += 1
    return count


def check_graph_and_sync(device: torch.device) -> int:
    """A captured forward and backward gives the eager numbers, and nothing waits for the GPU."""
    leaf, targets, _ = inputs(device, (16, 4099, 4099), torch.bfloat16)
    leaf = torch.nan_to_num(leaf, neginf=-30.0)
    both_ways(leaf, targets, None, 4099)
    torch.cuda.set_sync_debug_mode("error")
    try:
        both_ways(leaf, targets, None, 4099)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        both_ways(leaf, targets, None, 4099)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_ways(leaf, targets, None, 4099)
    for _ in range(5):
        leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        for a, b in zip(captured, both_ways(leaf, targets, None, 4099), strict=True):
            assert torch.equal(a, b), "a replay differs from the eager step"
    return 6


def ours(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probs, entropy as a metric, gradient in place."""
    logp, _ = vocab_parallel_logprob_entropy(
        logits, targets, entropy="metric", inplace_backward=True
    )
    return logp.sum()


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    """torch.log_softmax, and the entropy from it without gradient."""
    log_p = torch.log_softmax(logits.float(), -1)
    with torch.no_grad():
        (log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None]).sum()


def megatron(logits: Tensor, targets: Tensor) -> Tensor:
    """Megatron's vocabulary-parallel cross entropy (one rank), and the entropy beside it."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = logits.float()
    with torch.no_grad():
        p = torch.softmax(logits, -1)
        (torch.logsumexp(logits, -1) - (p * logits).sum(-1)).sum()
        del p
    group = torch.distributed.group.WORLD
    return -vocab_parallel_cross_entropy(logits[:, None], targets[:, None], 0.0, group).sum()


def liger(logits: Tensor, targets: Tensor) -> Tensor:
    """liger-kernel's cross entropy, which has no entropy."""
    functional = importlib.import_module("liger_kernel.transformers.functional")
    return -functional.liger_cross_entropy(logits, targets, reduction="sum")


CONTENDERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ours": ours,
    "torch log_softmax + entropy": plain,
    "Megatron's cross entropy + entropy": megatron,
    "liger-kernel's cross entropy": liger,
}


def measured(contender: Callable[[Tensor, Tensor], Tensor], leaf: Tensor, targets: Tensor) -> str:
    """Cells of one contender: milliseconds and GB of memory beside the logits, both ways."""

    def step() -> None:
        # Some write into the logits: values then differ from run to run, the time does not.
        x = leaf.detach().requires_grad_().view_as(leaf)
        torch.autograd.grad(contender(x, targets), x)

    try:
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = torch.cuda.max_memory_allocated() - before
        return f"{microseconds(step, 10) / 1e3:.2f} | {peak / 1e9:.2f}"
    except torch.cuda.OutOfMemoryError:
        return "out of memory |"
    except ImportError:
        return "not installed |"
    finally:
        torch.cuda.empty_cache()


def table(
    device: torch.device, copy_rate: float, num_rows: int = 16_384, vocabulary: int = 152_064
) -> list[str]:
    """Rows for the shards of 1 to 8 tensor-parallel ranks; `copy_rate` in GB/s."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    rows = [
        f"T = {num_rows}, V = {vocabulary}; bytes of ours: 3 per byte of logits.", "",
        "| logits | V/tp | | ms | GB beside the logits | GB/s ÷ copy |", "|" + "---|" * 6,
    ]  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        for tp in (8, 4, 2, 1):
            width = vocabulary // tp
            leaf = torch.empty(num_rows, width, dtype=dtype, device=device).normal_()
            targets = torch.randint(width, (num_rows,), device=device)
            for name, contender in CONTENDERS.items():
                cells = measured(contender, leaf, targets)
                share = ""
                if name == "ours" and cells[0].isdigit():
                    rate = 3 * leaf.nbytes / float(cells.split(" |")[0]) / 1e6
                    share = f"{rate / copy_rate:.2f}"
                kind = str(dtype).removeprefix("torch.")
                rows.append(f"| {kind} | {width} | {name} | {cells} | {share} |")
                leaf.normal_()
            del leaf
    return rows

"""Time, launches and bandwidth of the reductions on a GPU, beside other ways to compute them.

Called by `gpu_check.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.reduce_cpu import Case
from benchmarks.reduce_gpu_checks import policy_inputs
from megatron_dynbatch.logprob import vocab_parallel_logprob_entropy
from megatron_dynbatch.reduce import PolicyFormula, policy_loss_sums

SHAPES = [(b, t, k) for t in (6144, 49152, 262144) for b in (8, 64, 256) for k in (1, 8)]


def on_device(case: Case, device: torch.device) -> Case:
    """A benchmark case with its tensors on the GPU."""
    case.x = case.x.detach().to(device).requires_grad_()
    case.masks = [mask.to(device) for mask in case.masks]
    case.samples, case.w, case.w32 = (t.to(device) for t in (case.samples, case.w, case.w32))
    return case


def microseconds(function: Callable[[], object], repeats: int = 50) -> float:
    """Median time of a call on the GPU, launches included, with a cold start left out."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def graph_microseconds(function: Callable[[], object]) -> float:
    """Time of one call inside a captured graph of 20: what the GPU alone needs."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            function()
    return microseconds(graph.replay, 20) / 20


def kernel_launches(function: Callable[[], object]) -> int:
    """GPU kernels that one call starts, counted by torch's profiler."""
    function()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(e.device_type == cuda and "Mem" not in e.name for e in profile.events())


def copy_rate(device: torch.device) -> float:
    """GB/s of a large device-to-device copy, read and write counted."""
    source = torch.empty(2**28, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / microseconds(lambda: target.copy_(source), 20) / 1e3


def reductions(device: torch.device) -> list[str]:
    """Rows of the table of reductions, forward and backward."""
    rows = [
        "| B | T | K | ours, µs | in a graph | GB/s | launches | per sample | x @ w | index_add "
        "| loop | loop's launches |",
        "|" + "---|" * 12,
    ]
    for shape in SHAPES:
        case = on_device(Case(*shape), device)

        def both(name: str, case: Case = case) -> Callable[[], Tensor]:
            def run() -> Tensor:
                return torch.autograd.grad(getattr(case, name)().sum(), case.x)[0]

            return run

        ours = both("ours")
        num_bytes = case.x.numel() * 4 * 2 + case.w.numel() * 8 * 2
        alone = graph_microseconds(ours)
        times = {
            name: microseconds(both(name), 3 if name == "loop" else 50)
            for name in ("ours", "ours_per_sample", "plain", "index_add", "loop")
        }
        cells = [
            *map(str, shape), f"{times['ours']:.0f}", f"{alone:.1f}",
            f"{num_bytes / alone / 1e3:.0f}", str(kernel_launches(ours)),
            *[f"{times[n]:.0f}" for n in ("ours_per_sample", "plain", "index_add", "loop")],
            str(kernel_launches(both("loop"))),
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def policy(device: torch.device) -> list[str]:
    """Rows of the table of the policy loss: fused against the same formula in torch."""
    rows = [
        "| T | fused, µs | in a graph | GB/s | torch, µs | launches: fused, torch |",
        "|" + "---|" * 6,
    ]
    for tokens in (16_384, 262_144):
        x = policy_inputs(device, tokens)
        logp = torch.nan_to_num(x["logp"]).requires_grad_()

        def fused(x: dict[str, Tensor] = x, logp: Tensor = logp) -> Tensor:
            sums = policy_loss_sums(logp, x["old_logp"], x["advantages"], x["w"], PolicyFormula())
            return torch.autograd.grad(sums["loss"], logp)[0]

        def plain(x: dict[str, Tensor] = x, logp: Tensor = logp) -> Tensor:
            delta = (logp - torch.nan_to_num(x["old_logp"])).clamp(-20, 20)
            ratio, advantage = delta.exp(), torch.nan_to_num(x["advantages"])
            bounded = -advantage * ratio.clamp(0.8, 1.2)
            loss = torch.maximum(-advantage * ratio, bounded)
            w = x["w"].float()
            metrics = [bounded > -advantage * ratio, ratio - 1 - delta, ratio, delta.abs() > 20]
            for metric in metrics:
                (metric.detach() * w).sum()
            return torch.autograd.grad((loss * w).sum(), logp)[0]

        alone = graph_microseconds(fused)
        cells = [
            str(tokens), f"{microseconds(fused):.0f}", f"{alone:.1f}",
            f"{tokens * 32 / alone / 1e3:.0f}", f"{microseconds(plain):.0f}",
            f"{kernel_launches(fused)}, {kernel_launches(plain)}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def from_logits(device: torch.device, tokens: int = 8192, vocabulary: int = 32_768) -> list[str]:
    """Rows: log-probs and policy loss from logits in bf16, ours and liger-kernel's GRPO loss."""
    ids = torch.randint(vocabulary, (tokens,), device=device)
    x = {k: torch.nan_to_num(v) for k, v in policy_inputs(device, tokens).items()}
    advantage = torch.ones(1, device=device)
    logits = torch.randn(tokens, vocabulary, device=device).bfloat16().requires_grad_()

    def ours() -> Tensor:
        logp, _ = vocab_parallel_logprob_entropy(logits, ids)
        old, advantages = x["old_logp"], advantage.expand(tokens).contiguous()
        sums = policy_loss_sums(logp, old, advantages, x["w"], PolicyFormula())
        return torch.autograd.grad(sums["loss"], logits)[0]

    rows = ["| T | V | | µs | launches |", "|---|---|---|---|---|"]
    contenders: dict[str, Callable[[], Tensor]] = {"ours": ours}
    try:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss
    except ImportError:
        missing = "liger-kernel is not installed"
    else:
        missing = ""
        mask = (x["w"] != 0).long()[None]
        one_more = torch.cat([logits.detach(), logits.detach()[:1]])[None].requires_grad_()

        def liger() -> Tensor:
            losses, *_ = triton_grpo_loss(
                one_more, x["old_logp"][None], None, ids[None], advantage, mask,
                temperature=1.0, beta=0.0, eps_low=0.2, eps_high=0.2, inplace=False, reduce=False,
            )  # fmt: skip
            return torch.autograd.grad((losses[0] * x["w"].float()).sum(), one_more)[0]

        contenders["liger-kernel, triton_grpo_loss"] = liger
    for name, run in contenders.items():
        cells = f"{microseconds(run, 20):.0f} | {kernel_launches(run)}"
        rows.append(f"| {tokens} | {vocabulary} | {name} | {cells} |")
    return [*rows, "", missing] if missing else rows

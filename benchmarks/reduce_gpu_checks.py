"""Checks of the reduction kernels on a GPU, each against the torch reference in float64 on the CPU.

Called by `gpu_check.py`. On another device ("cpu") the same code runs against itself, which checks
this file and nothing else.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dynbatch.reduce import (
    PolicyFormula,
    SegmentTable,
    limbs_to_float64,
    policy_loss_sample_sums,
    policy_loss_sums,
    policy_reference,
    reference,
    segment_sums,
    segment_table,
    token_weights,
    weighted_sums,
)
from megatron_dynbatch.reduce.kernels import DTYPES

TOLERANCE = dict(rtol=1e-12, atol=1e-12)


class Batch:
    """Random samples on one context-parallel rank, on a device, with NaN outside responses."""

    def __init__(
        self,
        device: torch.device,
        *,
        seed: int,
        num_samples: int,
        longest: int,
        num_values: int = 3,
        cp: tuple[int, int] = (1, 0),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rng = np.random.default_rng(seed)
        responses = rng.integers(0, longest + 1, num_samples)
        totals = responses + rng.integers(1, 50, num_samples)
        self.table: SegmentTable = segment_table(totals, responses, cp_size=cp[0], cp_rank=cp[1])
        masks = torch.from_numpy(rng.integers(0, 2, responses.sum()).astype(np.uint8))
        denoms = torch.from_numpy(rng.integers(1, 9, num_samples).astype(np.float64))
        x = torch.full((num_values, self.table.num_tokens), torch.nan, dtype=torch.float64)
        here = self.table.positions
        x[:, here] = torch.from_numpy(rng.normal(size=(num_values, here.size)))
        self.masks, self.denoms = masks.to(device), denoms.to(device)
        self.x = x.to(dtype).to(device)
        self.cpu_x, self.cpu_masks, self.cpu_denoms = x.to(dtype), masks, denoms
        self.index = self.table.on(torch.device("cpu"))


def batches(device: torch.device, small: bool) -> Iterator[tuple[str, Batch]]:
    """Named batches over layouts, sizes and element types."""
    for size in (1, 2, 4, 8):
        for rank in range(size):
            batch = Batch(device, seed=rank, num_samples=7, longest=300, cp=(size, rank))
            yield f"cp {rank}/{size}", batch
    for num_samples in (0, 1, 300):
        yield f"B={num_samples}", Batch(device, seed=1, num_samples=num_samples, longest=40)
    for num_values in (1, 2, 8, 9, 17):
        batch = Batch(device, seed=2, num_samples=5, longest=90, num_values=num_values)
        yield f"K={num_values}", batch
    for dtype in DTYPES:
        yield str(dtype), Batch(device, seed=3, num_samples=5, longest=5000, dtype=dtype)
    if not small:
        yield "T≈400k", Batch(device, seed=4, num_samples=64, longest=12_000, num_values=8)


def check_reductions(device: torch.device, small: bool = False) -> int:
    """Weights, sums and gradients of every batch; returns how many were compared."""
    count = 0
    for name, batch in batches(device, small):
        w = token_weights(batch.masks, batch.denoms, batch.table)
        sources, samples = batch.index.sources, batch.index.samples
        assert sources is not None and samples is not None
        cpu_w = reference.token_weights(batch.cpu_masks, batch.cpu_denoms, sources, samples)
        assert torch.equal(w.cpu(), cpu_w), f"{name}: token weights"
        x = batch.x.clone().requires_grad_()
        total, per_sample = segment_sums(x, w, batch.table)
        alone = weighted_sums(batch.x, w)
        expected = reference.segment_sums(
            batch.cpu_x.double(), cpu_w, samples, batch.table.num_samples
        )
        for got, right in ((total, expected[0]), (alone, expected[0]), (per_sample, expected[1])):
            torch.testing.assert_close(got.detach().cpu(), right, **TOLERANCE, msg=name)
        grads = torch.randn_like(total), torch.randn_like(per_sample)
        torch.autograd.backward((total, per_sample), grads)
        right = reference.segment_sums_backward(
            grads[0].cpu(), grads[1].cpu(), cpu_w, samples, x.dtype
        )
        assert torch.equal(x.grad.cpu(), right), f"{name}: gradient"
        limbs = segment_sums(batch.x, w, batch.table, accumulate="exact")
        cpu_limbs = segment_sums(batch.cpu_x, cpu_w, batch.table, accumulate="exact")
        for a, b in zip(limbs, cpu_limbs, strict=True):
            assert torch.equal(a.cpu(), b), f"{name}: exact sums"
        torch.testing.assert_close(limbs_to_float64(limbs[0]).cpu(), expected[0], **TOLERANCE)
        count += 1
    return count


def policy_inputs(device: torch.device, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Per-token tensors of the policy loss, float32, and weights; NaN where a weight is 0."""
    rng = np.random.default_rng(seed)
    w = rng.uniform(0, 1, tokens) * rng.integers(0, 2, tokens)
    old = rng.normal(-1, 0.5, tokens)
    values: dict[str, Any] = {"old_logp": old}
    values |= {
        name: old + rng.normal(0, 0.4, tokens) for name in ("logp", "ref_logp", "rollout_logp")
    }
    values |= {"advantages": rng.normal(size=tokens), "entropy": rng.uniform(0, 2, tokens)}
    tensors = {
        name: torch.tensor(np.where(w == 0, np.nan, v), dtype=torch.float32, device=device)
        for name, v in values.items()
    }
    return {**tensors, "w": torch.tensor(w, device=device)}


FORMULAS = [
    PolicyFormula(surrogate=surrogate, kl=kl, kl_coef=0.1, importance=importance, entropy_coef=eta)
    for surrogate in policy_reference.SURROGATES
    for kl in ("k1", "k2", "k3", "low_var")
    for importance, eta in ((None, 0.0), ("truncate", 0.01), ("mask", 0.01))
] + [PolicyFormula(dual_clip=2.0)]


def given_tensors(x: dict[str, Tensor], formula: PolicyFormula) -> dict[str, Tensor | None]:
    """The optional tensors that a formula reads."""
    return {
        "ref_logp": x["ref_logp"] if formula.kl else None,
        "rollout_logp": x["rollout_logp"] if formula.importance else None,
        "entropy": x["entropy"],
    }


def run_policy(x: dict[str, Tensor], formula: PolicyFormula) -> tuple[dict[str, Tensor], Tensor]:
    """Sums and the gradient in the log-probs."""
    logp = x["logp"].clone().requires_grad_()
    sums = policy_loss_sums(
        logp, x["old_logp"], x["advantages"], x["w"], formula, **given_tensors(x, formula)
    )
    (grad,) = torch.autograd.grad(sums["loss"], logp)
    return sums, grad


def check_policy(device: torch.device, small: bool = False) -> int:
    """Every formula against the reference in float64; returns how many were compared."""
    tokens = 3000 if small else 100_000
    x = policy_inputs(device, tokens)
    lengths = [tokens // 3, 0, 1, tokens - tokens // 3 - 1]
    table = segment_table([n + 1 for n in lengths], lengths, layout="response")
    wide = {name: tensor.cpu().double() for name, tensor in x.items()}
    for formula in FORMULAS:
        sums, grad = run_policy(x, formula)
        right_sums, right_grad = run_policy(wide, formula)
        assert sums.keys() == right_sums.keys(), f"{formula}: {sorted(sums)}"
        for name, value in sums.items():
            if not name.endswith("fraction"):  # float32 may fall on the other side of a bound
                scale = x["w"].sum().item()
                error = abs(value.item() - right_sums[name].item()) / scale
                assert error < 1e-5, f"{formula}: {name} off by {error:.1e} of Σ w"
        check_sample_sums(x, wide, formula, table)
        near = torch.isclose(grad.cpu().double(), right_grad, rtol=1e-4, atol=1e-5)
        assert near.float().mean() > 0.999, f"{formula}: gradient"
    return len(FORMULAS)


def check_sample_sums(
    x: dict[str, Tensor], wide: dict[str, Tensor], formula: PolicyFormula, table: SegmentTable
) -> None:
    """Losses of each sample and the gradient through them, against float64."""
    results = []
    for tensors in (x, wide):
        logp = tensors["logp"].clone().requires_grad_()
        _, sums = policy_loss_sample_sums(
            logp, tensors["old_logp"], tensors["advantages"], tensors["w"], formula, table,
            **given_tensors(tensors, formula),
        )  # fmt: skip
        scale = torch.arange(1.0, table.num_samples + 1, dtype=torch.float64, device=logp.device)
        (grad,) = torch.autograd.grad(sums["loss"] @ scale, logp)
        results.append((sums["loss"].detach().cpu(), grad.cpu().double()))
    (losses, grad), (right_losses, right_grad) = results
    error = (losses - right_losses).abs().max().item() / wide["w"].sum().item()
    assert error < 1e-5, f"{formula}: losses of samples off by {error:.1e} of Σ w"
    near = torch.isclose(grad, right_grad, rtol=1e-4, atol=1e-5)
    assert near.float().mean() > 0.999, f"{formula}: gradient through the sums of samples"


def check_bits(device: torch.device, runs: int = 100) -> int:
    """The same bits in every run, with other work on the GPU in between."""
    batch = Batch(device, seed=5, num_samples=100, longest=3000, num_values=8)
    w = token_weights(batch.masks, batch.denoms, batch.table)
    x = policy_inputs(device, 50_000)
    seen: list[Tensor] | None = None
    for _ in range(runs):
        torch.randn(200, 200, device=device).square()
        total, per_sample = segment_sums(batch.x, w, batch.table)
        sums, grad = run_policy(x, PolicyFormula())
        results = [total, per_sample, weighted_sums(batch.x, w), sums["loss"].detach(), grad]
        if seen is None:
            seen = results
        assert all(torch.equal(a, b) for a, b in zip(seen, results, strict=True)), "other bits"
    return runs


def check_graph(device: torch.device, replays: int = 20) -> int:
    """A captured forward and backward gives the eager numbers for new values, replay by replay."""
    batch = Batch(device, seed=6, num_samples=40, longest=900, num_values=4)
    w = token_weights(batch.masks, batch.denoms, batch.table)
    x = torch.nan_to_num(batch.x).requires_grad_()

    def step() -> tuple[Tensor, Tensor, Tensor]:
        total, per_sample = segment_sums(x, w, batch.table)
        (grad,) = torch.autograd.grad(total.sum() + per_sample.square().sum(), x)
        return total, per_sample, grad

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(replays):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b), "a replay differs from the eager step"
    return replays


def check_no_sync(device: torch.device) -> int:
    """Nothing in the forward or backward path makes the host wait for the GPU."""
    batch = Batch(device, seed=7, num_samples=20, longest=500)
    x = policy_inputs(device, 5000)
    batch.table.on(device)
    run: Callable[[], Any]
    checked = 0
    for run in (
        lambda: token_weights(batch.masks, batch.denoms, batch.table),
        lambda: segment_sums(
            batch.x.clone().requires_grad_(),
            token_weights(batch.masks, batch.denoms, batch.table),
            batch.table,
        )[0].sum().backward(),
        lambda: run_policy(x, PolicyFormula()),
    ):  # fmt: skip
        run()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        checked += 1
    return checked

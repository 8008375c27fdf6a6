"""Every named policy loss against its paper's formula, written as loops over whole samples."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dynbatch import losses
from megatron_dynbatch.layout import MicroBatch, build_micro_batch
from megatron_dynbatch.losses.surrogates import SEQUENCE_SURROGATES
from megatron_dynbatch.plan import ParallelLayout, Plan
from megatron_dynbatch.rollouts import Sample
from tests.layout.helpers import plan_of
from tests.pool import run_ranks

NAMES = ("ppo", "grpo", "dr_grpo", "dapo", "cispo", "gspo", "gmpo", "reinforce")
# On top of each loss's own options, so that every branch is taken by some token.
OPTIONS: dict[str, dict[str, object]] = {
    "ppo": {"dual_clip": 1.5, "importance": "truncate", "importance_bounds": (0.0, 1.1)},
    "dapo": {"importance": "mask", "importance_bounds": (0.8, 1.2)},
    "cispo": {"clip_low": 0.2, "clip_high": 0.3},
    "gspo": {"clip_low": 0.02, "clip_high": 0.04, "off_policy_threshold": 0.05},
    "gmpo": {"clip_low": 0.1, "clip_high": 0.15, "kl": "low_var", "kl_coef": 0.2},
}


def make_samples(seed: int = 0, count: int = 7) -> list[Sample]:
    """Fan-out over four rollouts, masks with holes, one empty mask; one advantage per sample."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        length = int(rng.integers(2, 14))
        mask = (rng.random(length) < 0.7).astype(int)
        mask[-1] = i != 4
        if i == 4:
            mask[:] = 0
        base = rng.normal(-2, 0.5, length)
        columns = {
            name: base + rng.normal(0, 0.25, length)
            for name in ("log_probs", "ref_log_probs", "rollout_log_probs")
        }
        samples.append(
            Sample(
                rng.integers(0, 50, int(rng.integers(1, 5)) + length),
                loss_mask=mask,
                rollout_id=i % 4,
                advantage=float(rng.normal()),
                **columns,
            )
        )
    return samples


SAMPLES = make_samples()


def new_log_probs(sample: Sample) -> np.ndarray:
    """What the model says now, near the old log-probs; a function of the sample alone."""
    rng = np.random.default_rng(len(sample.tokens) * 1000 + int(sample.tokens[0]))
    return sample.log_probs.astype(np.float64) + rng.normal(0, 0.25, sample.response_length)


def output_of(mb: MicroBatch, samples: list[Sample]) -> Tensor:
    """Token losses [T_local] for this rank's part, NaN wherever no response is predicted."""
    values = np.concatenate([new_log_probs(samples[row]) for row in mb.sample_rows] + [[np.nan]])
    return torch.from_numpy(-values[mb.segments.sources])


def paper_loss(name: str, sample: Sample, logp: Tensor) -> Tensor:
    """Σ_t m·x of one sample, from whole tensors [R] in float64."""
    trained = torch.from_numpy(sample.loss_mask.astype(bool))

    def column(field: str) -> Tensor:
        return torch.from_numpy(getattr(sample, field).astype(np.float64))[trained]

    logp, old, rollout, ref = (
        logp[trained], column("log_probs"), column("rollout_log_probs"), column("ref_log_probs"),
    )  # fmt: skip
    n, a = len(logp), float(np.float32(sample.advantage))
    r = (logp - old).exp()
    if name in ("grpo", "dr_grpo"):
        x = -torch.min(a * r, a * r.clamp(0.8, 1.2))
        if name == "grpo":
            x = x + 0.04 * ((ref - logp).exp() - (ref - logp) - 1)
        return x.sum()
    if name == "ppo":
        x = torch.min(a * r, a * r.clamp(0.8, 1.2))
        if a < 0:
            x = torch.max(x, torch.full_like(x, 1.5 * a))
        return (-x * torch.clamp((old - rollout).exp(), max=1.1)).sum()
    if name == "dapo":
        weight = (old - rollout).exp()
        weight[(weight < 0.8) | (weight > 1.2)] = 0
        return (-torch.min(a * r, a * r.clamp(0.8, 1.28)) * weight).sum()
    if name == "cispo":
        return (-r.detach().clamp(0.8, 1.3) * a * logp).sum()
    if name == "gspo":
        s = (logp - old).mean().exp()
        if a < 0 and (old - logp).mean() > 0.05:
            return 0.0 * s
        return -n * torch.min(a * s, a * s.clamp(0.98, 1.04))
    if name == "gmpo":
        sign = 1.0 if a > 0 else -1.0
        bounds = (np.exp(-0.1), np.exp(0.15))
        product = torch.min(sign * r, sign * r.clamp(*bounds)).abs().prod()
        delta = ref - logp
        kl = torch.clamp(delta.exp() - delta - 1, -10, 10)
        return -a * n * product ** (1 / n) + 0.2 * kl.sum()
    return (-a * logp).sum()


def expected(name: str, reduction: str) -> tuple[float, list[np.ndarray]]:
    """Σ w·x of the whole step and its gradient by each sample's new log-probs [R]."""
    masks = np.array([s.mask_sum for s in SAMPLES])
    denoms = {
        "token": np.ones(len(SAMPLES)),
        "sample": masks,
        "rollout": np.array([masks[i % 4 :: 4].sum() for i in range(len(SAMPLES))]),
        "constant": np.full(len(SAMPLES), 16.0),
    }[reduction]
    total, gradients = 0.0, []
    for sample, denom in zip(SAMPLES, denoms, strict=True):
        logp = torch.from_numpy(new_log_probs(sample)).requires_grad_()
        if sample.mask_sum == 0:
            gradients.append(np.zeros(sample.response_length))
            continue
        loss = paper_loss(name, sample, logp) / denom
        (gradient,) = torch.autograd.grad(loss, logp)
        total += loss.item()
        gradients.append(gradient.numpy())
    return total, gradients


def local_results(
    name: str, plan: Plan, cp_rank: int, cp_group: object = None
) -> tuple[float, dict[int, np.ndarray]]:
    """Σ w·x over this rank's tokens of all micro-batches, and the gradient by response entry."""
    total, gradients = 0.0, {i: np.zeros(s.response_length) for i, s in enumerate(SAMPLES)}
    for k in range(plan.steps[0].num_microbatches):
        mb = build_micro_batch(plan, 0, 0, k, dict(enumerate(SAMPLES)), cp_rank=cp_rank)
        output = output_of(mb, SAMPLES).requires_grad_()
        loss, sums = losses.__dict__[name](output, mb, cp_group=cp_group, **OPTIONS.get(name, {}))
        loss.backward()
        assert sums["loss"].item() == loss.item()
        total += loss.item()
        rows = np.repeat(mb.sample_rows, mb.response_lengths) if mb.sample_rows else []
        places = [(row, j) for row, n in zip(mb.sample_rows, mb.response_lengths, strict=True)
                  for j in range(n)]  # fmt: skip
        assert len(rows) == len(places)
        for position in mb.segments.positions:
            row, entry = places[mb.segments.sources[position]]
            gradients[row][entry] = -output.grad[position].item()
        others = np.setdiff1d(np.arange(mb.num_tokens), mb.segments.positions)
        assert not output.grad[others].any()
    return total, gradients


SPLITS = [[[list(range(7))]], [[[0, 5], [4], [1, 2, 3, 6], []]]]


@pytest.mark.parametrize("reduction", ["token", "sample", "rollout", "constant"])
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_follow_the_paper(name: str, reduction: str) -> None:
    loss, gradients = expected(name, reduction)
    for split in SPLITS:
        constant = 16.0 if reduction == "constant" else None
        plan = plan_of(SAMPLES, split, None, reduction, constant)
        found, by_sample = local_results(name, plan, 0)
        assert found == pytest.approx(loss, rel=1e-11)
        for i, gradient in enumerate(gradients):
            np.testing.assert_allclose(
                by_sample[i], gradient, rtol=1e-10, atol=1e-14, equal_nan=False
            )


def cp_job(split: list[list[list[int]]]) -> dict[str, tuple[float, dict[int, np.ndarray], list]]:
    """All losses on this context-parallel rank; shapes of everything that was all-reduced."""
    import torch.distributed as dist

    shapes: list[list[int]] = []
    all_reduce = dist.all_reduce

    def recording(tensor: Tensor, *args: object, **named: object) -> object:
        shapes.append(list(tensor.shape))
        return all_reduce(tensor, *args, **named)

    dist.all_reduce = recording
    layout = ParallelLayout(cp=dist.get_world_size())
    plan = plan_of(SAMPLES, split, layout, "sample")
    results = {}
    for name in NAMES:
        shapes.clear()
        total, gradients = local_results(name, plan, dist.get_rank(), dist.group.WORLD)
        results[name] = (total, gradients, [list(shape) for shape in shapes])
    return results


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_exchange_two_numbers_per_sample(cp: int) -> None:
    split = SPLITS[1]
    ranks = run_ranks(cp, cp_job, split)
    per_micro_batch = [len(rows) for rows in split[0] if rows]
    for name in NAMES:
        loss, gradients = expected(name, "sample")
        assert sum(rank[name][0] for rank in ranks) == pytest.approx(loss, rel=1e-11)
        for i, gradient in enumerate(gradients):
            summed = sum(rank[name][1][i] for rank in ranks)
            np.testing.assert_allclose(summed, gradient, rtol=1e-10, atol=1e-14, equal_nan=False)
        # GSPO also decides its off-policy mask: one more value in the same all-reduce.
        values = {"gspo": 3, "gmpo": 2}.get(name)
        shapes = [[values, b] for b in per_micro_batch] if values else []
        assert all(rank[name][2] == shapes for rank in ranks)


def test_without_its_group_a_sequence_loss_says_what_to_pass() -> None:
    plan = plan_of(SAMPLES, [[list(range(7))]], ParallelLayout(cp=2), "sample")
    mb = build_micro_batch(plan, 0, 0, 0, dict(enumerate(SAMPLES)))
    for name in SEQUENCE_SURROGATES:
        with pytest.raises(ValueError, match="group of size 2, got none: pass cp_group="):
            losses.__dict__[name](output_of(mb, SAMPLES), mb)


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo", "gspo", "gmpo", "reinforce"])
def test_gradcheck(name: str) -> None:
    # CISPO's weight is a constant of its own formula, so it alone has no numerical gradient.
    plan = plan_of(SAMPLES, [[[0, 1, 2, 3]]], None, "sample")
    mb = build_micro_batch(plan, 0, 0, 0, dict(enumerate(SAMPLES)))
    start = output_of(mb, SAMPLES).nan_to_num(0.0).requires_grad_()
    loss: Callable[..., tuple[Tensor, object]] = losses.__dict__[name]
    options = {**OPTIONS.get(name, {})}
    assert torch.autograd.gradcheck(lambda x: loss(x, mb, **options)[0], (start,))


def with_published_bounds(name: str, ratio: float, advantage: float) -> tuple[float, float]:
    """−x and its derivative by logp of one token at a ratio, with no option given."""
    sample = Sample([1, 2], 1, advantage=advantage, log_probs=[-1.0])
    mb = build_micro_batch(plan_of([sample], [[[0]]]), 0, 0, 0, {0: sample})
    # Token losses are −logp, NaN where nothing is predicted.
    output = torch.tensor([1.0 - np.log(ratio), np.nan], dtype=torch.float64, requires_grad=True)
    loss, _ = losses.__dict__[name](output, mb)
    loss.backward()
    assert output.grad is not None
    return -loss.item(), output.grad[0].item()


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "bounded"),
    [
        # MiniMax-M1 has no lower bound; the upper one is 1 + 2.
        ("cispo", 0.01, 1.0, 0.01), ("cispo", 2.9, 1.0, 2.9), ("cispo", 3.1, -1.0, 3.0),
        # GSPO, section 5.1: 3e-4 and 4e-4.
        ("gspo", 1.00035, 1.0, 1.00035), ("gspo", 1.00045, 1.0, 1.0004),
        ("gspo", 0.99975, -1.0, 0.99975), ("gspo", 0.99965, -1.0, 0.9997),
        # GMPO: e^-0.4 and e^0.4.
        ("gmpo", np.exp(0.35), 1.0, np.exp(0.35)), ("gmpo", np.exp(0.45), 1.0, np.exp(0.4)),
        ("gmpo", np.exp(-0.35), -1.0, np.exp(-0.35)), ("gmpo", np.exp(-0.45), -1.0, np.exp(-0.4)),
    ],
)  # fmt: skip
def test_bounds_without_options_are_the_published_ones(
    name: str, ratio: float, advantage: float, bounded: float
) -> None:
    value, derivative = with_published_bounds(name, ratio, advantage)
    if name == "cispo":  # the bounded ratio is a weight without gradient
        assert value == pytest.approx(bounded * advantage * (np.log(ratio) - 1), rel=1e-12)
        assert derivative == pytest.approx(bounded * advantage, rel=1e-12)
    else:
        assert value == pytest.approx(advantage * bounded, rel=1e-12)
        inside = ratio * advantage if bounded == ratio else 0.0
        assert derivative == pytest.approx(inside, rel=1e-12, abs=1e-15)

"""The fused policy loss against formulas written independently in float64, and its kernel."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from megatron_dynbatch.reduce import (
    PolicyFormula,
    kernels,
    ops,
    policy_loss_sample_sums,
    policy_loss_sums,
    policy_reference,
    segment_table,
)
from megatron_dynbatch.reduce.ops import OPS
from tests.reduce.policy_cases import CLIPPED_SURROGATE, EXPECTED_KL, POLICY, REFERENCE

NAN, INF = math.nan, math.inf


def f32(*values):
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "dual", "loss", "slope"),
    CLIPPED_SURROGATE,
)
def test_clipped_surrogate(log_ratio, advantage, dual, loss, slope):
    log_probs = f32(log_ratio).requires_grad_()
    options = PolicyFormula(clip_low=0.2, clip_high=0.28, dual_clip=dual)
    w = torch.ones(1, dtype=torch.float64)
    sums = policy_loss_sums(log_probs, f32(0.0), f32(advantage), w, options)
    sums["loss"].backward()
    assert sums["loss"].item() == pytest.approx(loss, rel=1e-6)
    assert log_probs.grad.item() == pytest.approx(slope, rel=1e-6)
    assert sums["ratio_clamped"].item() == (log_ratio == 100.0)


@pytest.mark.parametrize("estimator", EXPECTED_KL)
def test_kl_estimators_in_expectation(estimator):
    p = torch.tensor(POLICY)
    sums = policy_loss_sums(
        p.log(), p.log(), torch.zeros(3), p,
        PolicyFormula(kl=estimator), ref_logp=torch.tensor(REFERENCE).log(),
    )  # fmt: skip
    assert sums["kl"].item() == pytest.approx(EXPECTED_KL[estimator], rel=1e-12)
    assert sums["loss"].item() == 0.0  # no coefficient: reported, not part of the loss


def inputs(dtype, seed=0, tokens=300):
    rng = np.random.default_rng(seed)
    old = rng.normal(-1, 0.5, tokens)
    arrays = {
        "logp": old + rng.normal(0, 0.4, tokens),
        "old": old,
        "advantages": rng.normal(size=tokens),
        "ref": old + rng.normal(0, 0.4, tokens),
        "rollout": old + rng.normal(0, 0.8, tokens),
        "entropy": rng.uniform(0, 2, tokens),
    }
    arrays["logp"][TABLE.positions[:3]] = [50.0, -60.0, 22.0]
    w = rng.uniform(0, 1, tokens) * rng.integers(0, 2, tokens)
    if tokens == 300:
        w[TABLE.samples == TABLE.num_samples] = 0.0
        w[TABLE.positions[:3]] = 0.5
    return {name: torch.tensor(a, dtype=dtype) for name, a in arrays.items()}, torch.tensor(w)


def loss_by_autograd(x, options):
    """x of each token, written down once more, for torch's autograd to differentiate."""
    ratio = (x["logp"] - x["old"]).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    if options.surrogate == "reinforce":
        pg = -x["advantages"] * x["logp"]
    elif options.surrogate == "cispo":
        pg = -clipped.detach() * x["advantages"] * x["logp"]
    else:
        pg = -torch.minimum(ratio * x["advantages"], clipped * x["advantages"])
        if options.dual_clip:
            bound = -options.dual_clip * x["advantages"]
            pg = torch.where(x["advantages"] < 0, torch.minimum(pg, bound), pg)
    if options.importance:
        low, high = options.importance_bounds
        rho = (x["old"] - x["rollout"]).clamp(-20, 20).exp()
        inside = (rho >= low) & (rho <= high)
        pg = (rho * inside if options.importance == "mask" else rho.clip(max=high)) * pg
    delta = x["ref"] - x["logp"]
    kl = {
        None: 0 * delta, "k1": -delta, "k2": delta**2 / 2,
        "k3": delta.clamp(-20, 20).exp() - delta - 1,
        "low_var": (delta.clamp(-20, 20).exp() - delta - 1).clamp(-10, 10),
    }[options.kl]  # fmt: skip
    return pg + options.kl_coef * kl - options.entropy_coef * x["entropy"]


# Five samples whose responses take up all but the 20 tokens in between; w is 0 there.
TABLE = segment_table([56, 70, 6, 100, 68], [51, 65, 1, 95, 63])

VARIANTS = [
    PolicyFormula(
        surrogate=surrogate, kl=kl, kl_coef=0.1 if kl else 0.0, importance=importance, **extra
    )
    for surrogate, kl, importance, extra in product(
        ("clip", "cispo", "reinforce"),
        (None, "k1", "k2", "k3", "low_var"),
        (None, "truncate", "mask"),
        ({}, {"clip_high": 0.5, "importance_bounds": (0.1, 1.5), "entropy_coef": 0.01}),
    )
] + [PolicyFormula(dual_clip=2.0, clip_high=0.5, kl="k3", kl_coef=0.1)]


def given_tensors(x, options):
    return dict(
        ref_logp=x["ref"] if options.kl else None,
        rollout_logp=x["rollout"] if options.importance else None,
        entropy=x["entropy"],
    )


@pytest.mark.parametrize("options", VARIANTS)
def test_loss_and_gradients_of_every_variant(options):
    results = []
    for ours in (True, False):
        x, w = inputs(torch.float64)
        x["logp"].requires_grad_()
        x["entropy"].requires_grad_()
        if ours:
            given = given_tensors(x, options)
            sums = policy_loss_sums(x["logp"], x["old"], x["advantages"], w, options, **given)
            loss = sums["loss"]
        else:
            loss = (loss_by_autograd(x, options) * w).sum()
        loss.backward()
        results.append((loss.detach(), x["logp"].grad, x["entropy"].grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-12)
    if options.entropy_coef:
        torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-12, atol=1e-12)


def test_metrics_by_hand():
    w = torch.ones(3, dtype=torch.float64)
    sums = policy_loss_sums(
        f32(math.log(2), 0.0, 30.0), f32(0, 0, 0), f32(1, 1, -1), w,
        PolicyFormula(importance="truncate", importance_bounds=(0.0, 1.5), dual_clip=3.0),
        rollout_logp=f32(0, -1, 0), entropy=f32(1, 2, 3),
    )  # fmt: skip
    got = {name: value.item() for name, value in sums.items()}
    assert got == pytest.approx(
        {
            "loss": -1.2 - 1.5 + 3.0,
            "pg_loss": -1.2 - 1.5 + 3.0,
            "clip_fraction": 1.0,
            "dual_clip_fraction": 1.0,
            "approx_kl": (2 - 1 - math.log(2)) + 0 + (math.exp(20) - 1 - 20),
            "ratio": 2 + 1 + math.exp(20),
            "ratio_clamped": 1.0,
            "entropy": 6.0,
            "importance_weight": 1 + 1.5 + 1,
            "importance_fraction": 1.0,
        },
        rel=1e-6,
    )


def test_keys_follow_the_arguments():
    x, w = inputs(torch.float32)
    base = policy_loss_sums(x["logp"], x["old"], x["advantages"], w, PolicyFormula())
    assert not {"kl", "entropy", "importance_weight"} & base.keys()
    assert list(base) == [name for name in policy_reference.METRICS if name in base]


def test_nan_where_the_weight_is_0_changes_nothing():
    options = PolicyFormula(kl="k3", kl_coef=0.1, importance="mask", entropy_coef=0.1)
    results = []
    for junk in (0.0, NAN, INF):
        x, w = inputs(torch.float32)
        x = {name: torch.where(w == 0, junk, v).requires_grad_() for name, v in x.items()}
        given = given_tensors(x, options)
        sums = policy_loss_sums(x["logp"], x["old"], x["advantages"], w, options, **given)
        sums["loss"].backward()
        grads = x["logp"].grad.tolist(), x["entropy"].grad.tolist()
        results.append((*grads, {name: v.item() for name, v in sums.items()}))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("options", VARIANTS[::5])
def test_kernel_on_host(emulator, options, order):
    emulator.order = order
    x, w = inputs(torch.float32)
    x = {name: torch.where(w == 0, NAN, v) for name, v in x.items()}
    given = given_tensors(x, options).values()
    start = (x["logp"], x["old"], x["advantages"], w, *given, *options.scalars())
    sums = None
    for table in (None, TABLE):
        index = (None, None, 0)
        if table is not None:
            there = table.on(torch.device("cpu"))
            index = (there.pieces, there.samples, table.num_samples)
        emulator.launches.clear()
        got = kernels.policy_loss(*start, *index)
        assert emulator.launches == ["policy_loss"]
        expected = ops._TORCH["policy_loss"](*start, *index)
        for a, b, rtol in zip(got, expected, (1e-6, 1e-5, 1e-6), strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-6)
        sums = got[0] if sums is None else sums
        torch.testing.assert_close(got[0], sums, rtol=1e-12, atol=1e-12)


def test_sums_of_each_sample_and_their_gradient():
    options = PolicyFormula(kl="k3", kl_coef=0.1, entropy_coef=0.05)
    rows = torch.from_numpy(TABLE.samples)
    x, w = inputs(torch.float64)
    scale = torch.tensor([1.0, -2.0, 0.0, 3.0, 0.5])
    grads = []
    for ours in (True, False):
        leaves = [x[name].clone().requires_grad_() for name in ("logp", "entropy")]
        now = {**x, "logp": leaves[0], "entropy": leaves[1]}
        given = given_tensors(now, options)
        if ours:
            total, sums = policy_loss_sample_sums(
                leaves[0], x["old"], x["advantages"], w, options, TABLE, **given
            )
            assert total.keys() == sums.keys()
            for name in total:
                torch.testing.assert_close(sums[name].sum(), total[name])
            losses, loss = sums["loss"], total["loss"]
        else:
            terms = loss_by_autograd(now, options) * w
            losses = torch.stack([terms[rows == i].sum() for i in range(5)])
            loss = losses.sum()
        grads.append(
            (losses.detach(), *torch.autograd.grad(loss + losses @ scale.double(), leaves))
        )
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strided_inputs_give_the_numbers_of_float32(dtype):
    options = PolicyFormula(kl="k3", kl_coef=0.1, importance="truncate", entropy_coef=0.1)
    x, w = inputs(torch.float32)
    x = {name: v.to(dtype) for name, v in x.items()}
    results = []
    for convert in (torch.Tensor.float, lambda v: torch.stack([v, v], 1)[:, 0]):
        y = {name: convert(v) for name, v in x.items()}
        leaf = x["logp"].clone().requires_grad_()
        logp = leaf.float() if y["old"].dtype == torch.float32 else leaf
        start = (logp, y["old"], y["advantages"], w, options)
        total, sums = policy_loss_sample_sums(*start, TABLE, **given_tensors(y, options))
        total["loss"].backward()
        assert leaf.grad.dtype == dtype
        results.append((total["loss"].detach(), sums["loss"].detach(), leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_which_arguments_the_kernel_takes(monkeypatch):
    monkeypatch.setattr(kernels, "status", lambda device: kernels.Status(True, ""))
    x, w = inputs(torch.float32)
    index = TABLE.on(torch.device("cpu"))
    rest = (*PolicyFormula().scalars(), index.pieces, None, 5)
    start = (x["logp"], x["old"], x["advantages"], w, None, None)
    assert kernels.supports("policy_loss", (*start, x["entropy"], *rest))
    assert not kernels.supports("policy_loss", (*start, x["entropy"].double(), *rest))


def test_nan_where_a_token_counts_shows_in_the_kernel_too(emulator):
    w = torch.ones(1, dtype=torch.float64)
    for logp, advantage in ((NAN, 1.0), (0.0, NAN)):
        arguments = (f32(logp), f32(0.0), f32(advantage), w, None, None, None)
        sums = kernels.policy_loss(*arguments, *PolicyFormula().scalars(), None, None, 0)
        assert sums[0][0].isnan()


def test_opcheck():
    x, w = inputs(torch.float32, tokens=8)
    logp, entropy = x["logp"].requires_grad_(), x["entropy"].requires_grad_()
    options = PolicyFormula(kl="k3", kl_coef=0.1, entropy_coef=0.1).scalars()
    arguments = (logp, x["old"], x["advantages"], w, x["ref"], None, entropy, *options)
    torch.library.opcheck(OPS.policy_loss.default, (*arguments, None, None, 0))
    table = segment_table([5, 5], [3, 2])
    index = table.on(torch.device("cpu"))
    x, w = inputs(torch.float32, tokens=10)
    arguments = (
        x["logp"].requires_grad_(),
        x["old"],
        x["advantages"],
        w * torch.from_numpy(table.samples < 2),
    )
    arguments += (x["ref"], None, x["entropy"].requires_grad_(), *options)
    torch.library.opcheck(OPS.policy_loss.default, (*arguments, index.pieces, index.samples, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(clip_low=-0.1), "clip bounds must be ≥ 0, got -0.1 and 0.2"),
        (dict(dual_clip=0.5), "dual_clip must be > 1 .* got 0.5"),
        (dict(dual_clip=3.0, surrogate="cispo"), "goes with surrogate 'clip', got 3.0 with 'cis"),
        (dict(kl_coef=0.1), "kl_coef is 0.1 but kl is None"),
        (dict(kl="k4"), "kl is one of None, 'k1', .* got 'k4'"),
        (dict(surrogate="pg"), "surrogate is one of 'clip', 'cispo', 'reinforce', got 'pg'"),
        (dict(importance="mask", importance_bounds=(3.0, 2.0)), "importance_bounds must be 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyFormula(**options)


def test_bad_tensors():
    x, w = inputs(torch.float32, tokens=8)
    start = (x["logp"], x["old"], x["advantages"], w)
    with pytest.raises(ValueError, match="formula asks for ref_logp, but it is not given"):
        policy_loss_sums(*start, PolicyFormula(kl="k1"))
    with pytest.raises(ValueError, match="formula asks for rollout_logp"):
        policy_loss_sums(*start, PolicyFormula(importance="mask"))
    with pytest.raises(ValueError, match=r"old_logp has shape \[7\] .* shape \[8\]"):
        policy_loss_sums(start[0], start[1][1:], *start[2:], PolicyFormula())

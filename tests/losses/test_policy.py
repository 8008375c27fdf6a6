"""The policy and SFT losses against formulas written independently, and their limits."""


import numpy as np
import pytest
import torch

from megatron_dynbatch.layout import build_micro_batch
from megatron_dynbatch.losses import policy, sft
from megatron_dynbatch.losses.kl import kl_to_reference
from megatron_dynbatch.losses.surrogates import policy_terms
from megatron_dynbatch.rollouts import Sample
from tests.layout.helpers import plan_of
from tests.reduce.policy_cases import CLIPPED_SURROGATE, EXPECTED_KL, POLICY, REFERENCE

INF = float("inf")


def one(x):
    return torch.tensor([x], dtype=torch.float32)


def micro_batch(mask, reduction="token", **columns):
    sample = Sample(np.arange(len(mask) + 1), loss_mask=mask, **columns)
    return build_micro_batch(plan_of([sample], [[[0]]], reduction=reduction), 0, 0, 0, {0: sample})


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "dual", "loss", "slope"),
    CLIPPED_SURROGATE,
)
def test_clipped_surrogate(log_ratio, advantage, dual, loss, slope):
    log_probs = one(log_ratio).requires_grad_()
    terms = policy_terms(
        log_probs, one(0.0), one(advantage), clip_low=0.2, clip_high=0.28, dual_clip=dual
    )
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss, rel=1e-6)
    assert log_probs.grad.item() == pytest.approx(slope, rel=1e-6)
    assert terms.ratio_clamped.item() == (log_ratio == 100.0)


@pytest.mark.parametrize("estimator", EXPECTED_KL)
def test_kl_estimators_in_expectation(estimator):
    log_p, log_q = (torch.tensor(p).log() for p in (POLICY, REFERENCE))
    values = kl_to_reference(log_p, log_q, estimator).numpy()
    assert POLICY @ values == pytest.approx(EXPECTED_KL[estimator], rel=1e-12)


def test_policy_sums_follow_the_formula():
    rng = np.random.default_rng(1)
    mask = [1, 0, 1, 1, 0, 1]
    old, new, ref = (rng.normal(-1, 0.4, 6).astype(np.float32) for _ in range(3))
    advantage = rng.normal(size=6).astype(np.float32)
    mb = micro_batch(mask, "sample", log_probs=old, ref_log_probs=ref, advantage=advantage)
    output = torch.tensor([*-new, np.nan], requires_grad=True)
    loss, sums = policy(output, mb, clip_high=0.3, dual_clip=2.0, kl="k3", kl_coef=0.1)
    loss.backward()

    d = [a.astype(np.float64) for a in (old, new, ref, advantage)]
    old, new, ref, advantage = d
    w = np.array(mask) / 4
    r = np.exp(new - old)
    x = np.maximum(-advantage * r, -advantage * np.clip(r, 0.8, 1.3))
    x = np.where(advantage < 0, np.minimum(x, -2.0 * advantage), x)
    kl = np.exp(ref - new) - (ref - new) - 1
    assert loss.item() == pytest.approx((w * (x + 0.1 * kl)).sum(), rel=1e-6)
    assert sums["pg_loss"].item() == pytest.approx((w * x).sum(), rel=1e-5, abs=1e-7)
    assert sums["kl"].item() == pytest.approx((w * kl).sum(), rel=1e-5)
    assert sums["ratio"].item() == pytest.approx((w * r).sum(), rel=1e-6)
    assert sums["approx_kl"].item() == pytest.approx((w * (r - 1 - new + old)).sum(), rel=1e-5)
    assert output.grad.isfinite().all() and output.grad[[1, 4, 6]].tolist() == [0, 0, 0]


def test_infinite_kl_with_coefficient_zero_is_reported_and_harmless():
    columns = dict(log_probs=[-1.0, -1.0], advantage=1.0)
    grads, losses = [], []
    for ref in ([-1.0, -1.0], [-INF, -1.0]):
        mb = micro_batch([1, 1], ref_log_probs=ref, **columns)
        output = torch.tensor([1.1, 0.9, 0.0], requires_grad=True)
        loss, sums = policy(output, mb, kl="k3", kl_coef=0.0)
        loss.backward()
        losses.append(loss.item())
        grads.append(output.grad.tolist())
    assert losses[0] == losses[1] and grads[0] == grads[1]
    assert sums["kl"].item() == INF


def test_nan_in_columns_at_masked_tokens_changes_nothing():
    results = []
    for junk in (0.0, float("nan"), INF):
        mb = micro_batch([1, 0], log_probs=[-1.0, junk], ref_log_probs=[-2.0, junk], advantage=1.0)
        output = torch.tensor([1.1, junk, junk], requires_grad=True)
        loss, sums = policy(output, mb, kl="k2", kl_coef=0.5)
        loss.backward()
        results.append((loss.item(), output.grad.tolist(), {k: v.item() for k, v in sums.items()}))
    assert results[0] == results[1] == results[2]


def test_keys_depend_on_options_alone_and_dummies_run():
    sample = Sample([1, 2], loss_mask=[1], log_probs=[-1.0], advantage=1.0)
    plan = plan_of([sample], [[[0], []]])
    real, dummy = (build_micro_batch(plan, 0, 0, k, {0: sample}) for k in range(2))
    a, b = (policy(torch.zeros(mb.num_tokens), mb)[1] for mb in (real, dummy))
    assert a.keys() == b.keys() and all(value.item() == 0 for value in b.values())


def test_sft_from_logits_equals_sft_from_token_losses():
    mb = micro_batch([1, 0, 1], "sample")
    logits = torch.randn(4, 1, 8, dtype=torch.float64, requires_grad=True)
    loss, sums = sft(logits, mb)
    nll = torch.nn.functional.cross_entropy(logits[:, 0], mb.labels[0], reduction="none")
    assert loss.item() == pytest.approx((nll[0] + nll[2]).item() / 2, rel=1e-12)
    assert sums["lm loss"].item() == loss.item() and not sums["lm loss"].requires_grad
    from_losses, _ = sft(nll[None], mb)
    assert from_losses.item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: sft(x, mb)[0], (logits,))


def test_policy_gradcheck():
    mb = micro_batch([1, 1, 0, 1], log_probs=[-1, -2, -3, -1.5], advantage=[1, -1, 5, 2])
    start = torch.tensor([1.05, 2.1, 0.3, 1.45, 0.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: policy(x, mb)[0], (start,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(clip_low=-0.1), "clip bounds must be"),
        (dict(dual_clip=0.5), "dual_clip > 1"),
        (dict(kl_coef=0.1), "no KL estimator is chosen"),
        (dict(kl="k4"), "kl is one of k1, k2, k3, low_var, got 'k4'"),
        (dict(kl="k1"), "no ref_log_probs"),
        (dict(temperature=0.5), "need logits: do not pass labels"),
        (dict(entropy_coef=0.0), "need logits: do not pass labels"),
        (dict(surrogate="trpo"), "surrogate is one of clip, cispo, gspo, gmpo, reinforce"),
        (dict(surrogate="cispo", dual_clip=3.0), "'cispo' has no dual clip"),
        (dict(importance="truncate"), "no rollout_log_probs"),
        (dict(importance="truncate", old_log_probs="rollout"), "makes them the same"),
    ],
)
def test_bad_options(options, message):
    mb = micro_batch([1], log_probs=[-1.0], advantage=1.0)
    if "k4" in options.values():
        mb = micro_batch([1], log_probs=[-1.0], ref_log_probs=[-1.0], advantage=1.0)
    with pytest.raises(ValueError, match=message):
        policy(torch.zeros(2), mb, **options)

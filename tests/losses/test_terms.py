"""The terms around the surrogate: importance, off-policy mask, entropy, old log-probs, value."""

import math

import numpy as np
import pytest
import torch

from megatron_dynbatch.layout import MicroBatch, build_micro_batch
from megatron_dynbatch.losses import kl_to_reference, old_log_probs_source, policy, value
from megatron_dynbatch.losses.importance import importance_weights, off_policy_mask
from megatron_dynbatch.plan import PlanOptions
from megatron_dynbatch.rollouts import Sample
from tests.layout.helpers import plan_of

INF, NAN = float("inf"), float("nan")


def micro_batch(mask: list[int], reduction: str = "token", **columns: object) -> MicroBatch:
    sample = Sample(np.arange(len(mask) + 1), loss_mask=mask, **columns)
    return build_micro_batch(plan_of([sample], [[[0]]], reduction=reduction), 0, 0, 0, {0: sample})


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def test_truncated_and_masked_importance_weights() -> None:
    trainer, sampler = logs(0.1, 0.2, 0.3, 0.9), logs(0.2, 0.2, 0.1, 0.1)  # ρ = 0.5, 1, 3, 9
    weight, bounded = importance_weights(trainer, sampler, "truncate", (0.0, 2.0))
    assert weight.tolist() == pytest.approx([0.5, 1, 2, 2])
    assert bounded.tolist() == [0, 0, 1, 1]
    weight, bounded = importance_weights(trainer, sampler, "mask", (0.6, 5.0))
    assert weight.tolist() == pytest.approx([0, 1, 3, 0])
    assert bounded.tolist() == [1, 0, 0, 1]
    # ρ = e¹⁰⁰ is clamped before exp, in float32 too.
    far, _ = importance_weights(torch.tensor([0.0]), torch.tensor([-100.0]), "mask", (0.0, 1e30))
    assert far.item() == pytest.approx(math.exp(20), rel=1e-6)


def test_importance_changes_the_numerator_and_never_a_denominator() -> None:
    # ρ = 4 and 1; the first token is masked away, both count in d = 2.
    columns = dict(log_probs=[-1.0, -1.0], rollout_log_probs=[-1 - math.log(4), -1.0])
    mb = micro_batch([1, 1], "sample", advantage=3.0, **columns)
    output = torch.tensor([1.0, 1.0, NAN])
    loss, sums = policy(output, mb, importance="mask", importance_bounds=(0.5, 2.0))
    assert loss.item() == pytest.approx(-3.0 / 2)
    assert sums["importance_fraction"].item() == 0.5
    loss, sums = policy(output, mb, importance="truncate", importance_bounds=(0.0, 2.0))
    assert loss.item() == pytest.approx(-3.0 * (2 + 1) / 2)
    assert sums["importance_weight"].item() == pytest.approx(1.5)


@pytest.mark.parametrize("bounds", [(2.0, 1.0), (-1.0, 1.0), (0.0, 0.0)])
def test_importance_bounds_out_of_order(bounds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="importance bounds must be 0 ≤ low ≤ high"):
        importance_weights(logs(1), logs(1), "mask", bounds)


def test_off_policy_mask_keeps_good_answers_and_near_ones() -> None:
    mean = torch.tensor([-0.3, -0.3, -0.1, 0.3])  # of logp − old_logp
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    assert off_policy_mask(mean, advantages, 0.2).tolist() == [1, 0, 0, 0]


def test_off_policy_masking_is_decided_for_the_whole_sequence() -> None:
    # Mean old − new of the first sample is 0.3 although its first token moved the other way.
    far = Sample([1, 2, 3], loss_mask=[1, 1], advantage=-1.0, log_probs=[-1.0, -1.0])
    near = Sample([4, 5, 6], loss_mask=[1, 1], advantage=-1.0, log_probs=[-1.0, -1.0])
    plan = plan_of([far, near], [[[0, 1]]], reduction="token")
    mb = build_micro_batch(plan, 0, 0, 0, {0: far, 1: near})
    output = torch.tensor([0.8, 1.8, NAN, 0.9, 1.0, NAN], dtype=torch.float64, requires_grad=True)
    loss, sums = policy(output, mb, off_policy_threshold=0.25)
    loss.backward()
    # r = e^0.1 of A = −1 is never clipped from above.
    assert loss.item() == pytest.approx(math.exp(0.1) + 1.0)
    assert sums["off_policy_fraction"].item() == 2.0
    assert output.grad.tolist() == pytest.approx([0, 0, 0, -math.exp(0.1), -1.0, 0])


def test_low_variance_kl_is_k3_within_ten() -> None:
    near, far = torch.tensor([-1.0]), torch.tensor([-6.0])
    reference = torch.tensor([-1.2])
    assert kl_to_reference(near, reference, "low_var") == kl_to_reference(near, reference, "k3")
    assert kl_to_reference(far, reference, "k3").item() == pytest.approx(math.exp(4.8) - 5.8)
    assert kl_to_reference(far, reference, "low_var").item() == 10.0


def test_entropy_in_the_loss_and_as_a_mere_metric() -> None:
    mb = micro_batch([1, 0, 1], log_probs=[-1.0, -1.0, -1.0], advantage=0.0)
    start = torch.randn(4, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    p = start[:, 0].softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    trained = (entropy[0] + entropy[2]).item()

    def run(coefficient: float) -> tuple[float, float, torch.Tensor]:
        logits = start.clone().requires_grad_()
        loss, sums = policy(logits, mb, entropy_coef=coefficient)
        loss.backward()
        return loss.item(), sums["entropy"].item(), logits.grad

    loss, metric, gradient = run(0.5)
    assert (loss, metric) == pytest.approx((-0.5 * trained, trained))
    assert gradient.abs().sum() > 0 and not gradient[1].any()
    loss, metric, gradient = run(0.0)
    # Advantages are 0 too, so nothing at all is left.
    assert (loss, metric) == pytest.approx((0.0, trained)) and not gradient.any()


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "gspo", "gmpo", "reinforce"])
def test_current_log_probs_as_the_old_ones_are_on_policy_gradient(surrogate: str) -> None:
    mb = micro_batch([1, 0, 1], "sample", advantage=[2.0, 7.0, 2.0])
    output = torch.tensor([1.1, NAN, 0.4, NAN], dtype=torch.float64, requires_grad=True)
    loss, sums = policy(output, mb, surrogate=surrogate, old_log_probs="current")
    loss.backward()
    assert output.grad.tolist() == pytest.approx([1.0, 0, 1.0, 0])  # −A·∂logp/2, logp = −output
    assert (sums["ratio"].item(), sums["clip_fraction"].item()) == (1.0, 0.0)
    with_column = micro_batch([1, 0, 1], advantage=1.0, log_probs=[-1.0, -1.0, -1.0])
    assert policy(output, with_column, surrogate=surrogate)[1].keys() == sums.keys()


def test_the_sampler_may_be_the_old_policy() -> None:
    mb = micro_batch([1], advantage=1.0, rollout_log_probs=[-1.0])
    _, sums = policy(torch.tensor([0.9, NAN]), mb, old_log_probs="rollout")
    assert sums["ratio"].item() == pytest.approx(math.exp(0.1), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "keep", "source"),
    [
        (dict(rollouts_per_step=None), False, "current"),
        (dict(rollouts_per_step=None), True, "column"),
        (dict(rollouts_per_step=8), False, "column"),
        (dict(tokens_per_step=99, step_splitter="tokens"), False, "column"),
    ],
)
def test_the_old_pass_is_skipped_by_options_alone(
    options: dict[str, object], keep: bool, source: str
) -> None:
    plan_options = PlanOptions(max_tokens_per_gpu=64, **options)
    assert old_log_probs_source(plan_options, keep_column=keep) == source


def test_value_loss_by_hand_and_gradcheck() -> None:
    columns = dict(values=[1.0, 1.0, NAN, 0.0], returns=[2.0, 0.0, NAN, 0.5])
    mb = micro_batch([1, 1, 0, 1], "sample", **columns)
    output = torch.tensor([1.5, 0.5, NAN, 0.1, NAN], dtype=torch.float64, requires_grad=True)
    loss, sums = value(output, mb, clip=0.2)
    loss.backward()
    # Clipped to 1.2 (error 0.64 > 0.25), to 0.8 (0.64 > 0.25), and not clipped (0.16).
    assert loss.item() == pytest.approx((0.64 + 0.64 + 0.16) / 2 / 3)
    assert sums["value_clip_fraction"].item() == pytest.approx(2 / 3)
    assert output.grad.tolist() == pytest.approx([0, 0, 0, -0.4 / 3, 0])
    assert sums["return"].item() == pytest.approx(2.5 / 3)
    assert value(output, mb, clip=None)[0].item() == pytest.approx((0.25 + 0.25 + 0.16) / 2 / 3)
    start = torch.tensor([1.5, 0.5, 9.0, 0.1, 9.0], dtype=torch.float64, requires_grad=True)
    for clip in (0.2, None):
        assert torch.autograd.gradcheck(lambda x, c=clip: value(x[:, None], mb, clip=c)[0], start)


@pytest.mark.parametrize(
    ("output", "clip", "message"),
    [
        (torch.zeros(3), 0.2, r"shape \[3\], expected one value for each of 2"),
        (torch.zeros(2), 0.0, "clip must be positive or None"),
        (torch.zeros(2), 0.2, "no values; columns: returns"),
    ],
)
def test_bad_value_input(output: torch.Tensor, clip: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        value(output, micro_batch([1], returns=[1.0]), clip=clip)

"""Log-probs and entropy against torch's own log-softmax, gradcheck and the limits of floats."""

import math

import pytest
import torch

from megatron_dynbatch.losses import logprob
from megatron_dynbatch.losses.logprob import vocab_parallel_logprob_entropy

INF = float("inf")


def reference(logits, targets, temperature=1.0):
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    entropy = -(log_p.exp() * torch.where(log_p == -INF, 0.0, log_p)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("rows", [0, 1, 7, 1300])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_matches_log_softmax(rows, temperature):
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 37, generator=generator) * 4
    targets = torch.randint(37, (rows,), generator=generator)
    logp, entropy = vocab_parallel_logprob_entropy(
        logits, targets, temperature=temperature, entropy="metric"
    )
    for got, expected in zip((logp, entropy), reference(logits, targets, temperature), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(5, 9), (5, 1, 9), (1, 5, 9)])
def test_every_layout_of_logits(shape):
    logits = torch.randn(5, 9, dtype=torch.float64)
    targets = torch.arange(5)
    logp, entropy = vocab_parallel_logprob_entropy(logits.reshape(shape), targets[None])
    assert entropy is None
    torch.testing.assert_close(logp, reference(logits, targets)[0])


def test_gradcheck_of_both_outputs(monkeypatch):
    monkeypatch.setattr(logprob, "ROWS_PER_CHUNK", 2)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([1, 1, 0, 1, 1])

    def both(x):
        return vocab_parallel_logprob_entropy(
            x, torch.arange(5), mask=mask, temperature=0.7, entropy="grad"
        )

    assert torch.autograd.gradcheck(both, (logits,))


def test_entropy_as_a_metric_has_no_gradient():
    logits = torch.randn(3, 4, requires_grad=True)
    logp, entropy = vocab_parallel_logprob_entropy(logits, torch.arange(3), entropy="metric")
    assert logp.requires_grad and not entropy.requires_grad


def test_bfloat16_logits_give_float32_results_and_a_bfloat16_gradient():
    logits = torch.randn(4, 50).bfloat16().requires_grad_()
    logp, _ = vocab_parallel_logprob_entropy(logits, torch.arange(4))
    torch.testing.assert_close(
        logp.double(), reference(logits, torch.arange(4))[0], atol=1e-5, rtol=0
    )
    logp.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_extreme_logits():
    logits = torch.tensor(
        [[1e4, -1e4, 0.0], [0.0, -INF, 0.0], [-INF, 5.0, -INF]], requires_grad=True
    )
    logp, entropy = vocab_parallel_logprob_entropy(logits, torch.tensor([0, 2, 1]), entropy="grad")
    assert logp.tolist() == pytest.approx([0.0, -math.log(2), 0.0], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.0, math.log(2), 0.0], abs=1e-6)
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(logits.grad[1], torch.tensor([-0.5, 0.0, 0.5]))


def test_masked_rows_may_hold_nan():
    logits = torch.tensor([[1.0, 2.0], [float("nan")] * 2], requires_grad=True)
    logp, entropy = vocab_parallel_logprob_entropy(
        logits, torch.tensor([0, 0]), mask=torch.tensor([1.0, 0.0]), entropy="grad"
    )
    (logp.sum() + entropy.sum()).backward()
    assert logp[1] == 0 and entropy[1] == 0 and logits.grad[1].tolist() == [0, 0]
    assert logits.grad.isfinite().all()


def test_bad_input_names_the_shapes():
    with pytest.raises(ValueError, match=r"targets of shape \[2\] do not match .* \[3, 4\]"):
        vocab_parallel_logprob_entropy(torch.ones(3, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \[2, 2, 4\], expected \[T, V\]"):
        vocab_parallel_logprob_entropy(torch.ones(2, 2, 4), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        vocab_parallel_logprob_entropy(
            torch.ones(1, 4), torch.zeros(1, dtype=torch.long), temperature=0
        )

"""The head in chunks gives what the whole head and the plain function give."""

import pytest
import torch

from megatron_dynbatch.logprob import chunked_head_logprob_entropy, vocab_parallel_logprob_entropy

ROWS, WIDTH, HIDDEN = 11, 23, 6


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(WIDTH, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(20, (ROWS,), generator=generator)


@pytest.mark.parametrize("mask", [None, torch.arange(ROWS) % 3, torch.zeros(ROWS)])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_same_numbers_and_gradients(mask, size):
    hidden, weight, targets = tensors()
    options = dict(mask=mask, temperature=0.8, entropy="grad", vocab_size=20)
    results = []
    for whole in (True, False):
        if whole:
            both = vocab_parallel_logprob_entropy(hidden @ weight.T, targets, **options)
        else:
            both = chunked_head_logprob_entropy(
                hidden, weight, targets, rows_per_chunk=size, **options
            )
        loss = both[0].sum() + 0.3 * both[1].square().sum()
        results.append((*both, *torch.autograd.grad(loss, (hidden, weight))))
    for got, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_only_the_given_rows_are_multiplied():
    hidden, weight, targets = tensors()
    with torch.no_grad():
        hidden[5:] = torch.nan
    mask = torch.arange(ROWS) < 5
    logp, entropy = chunked_head_logprob_entropy(
        hidden, weight, targets, mask=mask, rows=torch.arange(5), rows_per_chunk=2
    )
    assert entropy is None
    grads = torch.autograd.grad(logp.sum(), (hidden, weight))
    assert all(g.isfinite().all() for g in grads) and not grads[0][5:].any()


def test_bfloat16_weights_get_one_rounded_sum():
    hidden, weight, targets = tensors()
    small = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    wide = [t.detach().double().requires_grad_() for t in small]
    for leaves in (small, wide):
        logp, _ = chunked_head_logprob_entropy(*leaves, targets, rows_per_chunk=2)
        logp.sum().backward()
    for got, right in zip(small, wide, strict=True):
        assert got.grad.dtype == torch.bfloat16
        scale = right.grad.abs().max().item()
        torch.testing.assert_close(got.grad.double(), right.grad, rtol=2e-2, atol=2e-2 * scale)


def test_bad_input():
    hidden, weight, targets = tensors()
    with pytest.raises(ValueError, match=r"\[23, 5\] does not fit hidden .* expected \[V/tp, 6\]"):
        chunked_head_logprob_entropy(hidden, weight[:, :5], targets)
    with pytest.raises(ValueError, match="rows_per_chunk must be at least 1, got 0"):
        chunked_head_logprob_entropy(hidden, weight, targets, rows_per_chunk=0)
    with pytest.raises(ValueError, match=r"targets of shape \[3\] do not match"):
        chunked_head_logprob_entropy(hidden, weight, targets[:3])

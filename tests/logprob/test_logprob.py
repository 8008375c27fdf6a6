"""Log-probs and entropy against torch's own log-softmax, gradcheck and the limits of floats."""

import math

import pytest
import torch

from megatron_dynbatch.logprob import reference as chunked
from megatron_dynbatch.logprob import vocab_parallel_logprob_entropy
from tests.logprob.helpers import INF, hard_rows, reference, reference_gradient


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
    monkeypatch.setattr(chunked, "ROWS_PER_CHUNK", 2)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_hard_rows_against_float64(dtype, temperature):
    logits = torch.stack(list(hard_rows(997).values())).to(dtype)
    targets = torch.zeros(len(logits), dtype=torch.long)
    x = logits.clone().requires_grad_()
    results = vocab_parallel_logprob_entropy(x, targets, temperature=temperature, entropy="grad")
    for got, right in zip(results, reference(logits, targets, temperature), strict=True):
        # A float32 near 2e4 has a spacing of 2e-3.
        torch.testing.assert_close(got.double(), right, atol=1e-5, rtol=1e-7)
    slopes = torch.linspace(-1, 2, len(logits)), torch.linspace(3, -1, len(logits))
    torch.autograd.backward(results, slopes)
    right = reference_gradient(logits, targets, slopes, temperature)
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(x.grad.double(), right, atol=1e-6, rtol=rounding)


@pytest.mark.parametrize("width", [1, 2, 3, 50_257])
def test_vocabularies_of_any_size(width):
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(width)) * 2
    targets = torch.tensor([0, width // 2, width - 1])
    results = vocab_parallel_logprob_entropy(logits, targets, entropy="metric")
    for got, right in zip(results, reference(logits, targets), strict=True):
        torch.testing.assert_close(got.double(), right, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [None, [1, 1, 0, 0, 1, 0, 1], [0] * 7])
def test_gradient_in_the_memory_of_the_logits(dtype, kept, monkeypatch):
    monkeypatch.setattr(chunked, "ROWS_PER_CHUNK", 2)
    leaf = torch.randn(7, 11).to(dtype).requires_grad_()
    mask = None if kept is None else torch.tensor(kept)
    grads = []
    for in_place in (False, True):
        logits = leaf * 1
        before = logits.detach().clone()
        logp, entropy = vocab_parallel_logprob_entropy(
            logits, torch.arange(7), mask=mask, temperature=1.3, entropy="grad",
            vocab_size=10, inplace_backward=in_place,
        )  # fmt: skip
        seen = []
        logits.register_hook(seen.append)
        grads.append(torch.autograd.grad(logp.sum() - entropy.sum(), leaf)[0])
        assert (seen[0].data_ptr() == logits.data_ptr()) == in_place
        assert in_place or torch.equal(logits, before)
    assert torch.equal(*grads)


def test_a_leaf_is_never_overwritten():
    leaf = torch.randn(2, 5, requires_grad=True)
    before = leaf.detach().clone()
    logp, _ = vocab_parallel_logprob_entropy(leaf, torch.arange(2), inplace_backward=True)
    logp.sum().backward()
    assert torch.equal(leaf, before) and not torch.equal(leaf.grad, before)


def test_logits_used_elsewhere_too_are_noticed():
    logits = torch.randn(2, 5, requires_grad=True) * 1
    logp, _ = vocab_parallel_logprob_entropy(logits, torch.arange(2), inplace_backward=True)
    loss = logp.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    logits = torch.randn(2, 5, requires_grad=True) * 1
    other = logits.square().sum()
    logp, _ = vocab_parallel_logprob_entropy(logits, torch.arange(2), inplace_backward=True)
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_padding_of_the_vocabulary_has_no_part_in_it():
    logits = torch.randn(4, 13)
    logits[:, 9:] = float("nan")
    x = logits.clone().requires_grad_()
    targets = torch.tensor([0, 8, 3, 3])
    results = vocab_parallel_logprob_entropy(x, targets, entropy="grad", vocab_size=9)
    for got, right in zip(results, reference(logits[:, :9], targets), strict=True):
        torch.testing.assert_close(got.double(), right, atol=1e-5, rtol=0)
    slopes = torch.ones(4), torch.ones(4)
    torch.autograd.backward(results, slopes)
    assert x.grad[:, 9:].eq(0).all()
    right = reference_gradient(logits[:, :9], targets, slopes)
    torch.testing.assert_close(x.grad[:, :9].double(), right, atol=1e-6, rtol=1e-6)


def test_without_gradient_nothing_is_kept():
    logits = torch.randn(4, 13, requires_grad=True)
    with torch.no_grad():
        logp, entropy = vocab_parallel_logprob_entropy(logits, torch.arange(4), entropy="grad")
    assert logp.grad_fn is None and entropy.grad_fn is None


def test_targets_outside_the_vocabulary():
    logits = torch.randn(2, 8)
    masked = torch.tensor([3, -100])
    logp, _ = vocab_parallel_logprob_entropy(logits, masked, mask=torch.tensor([1, 0]))
    assert logp[1] == 0
    for target in (-100, 7):
        with pytest.raises(ValueError, match=f"target {target} of row 1 is not in the vocab.* 7"):
            vocab_parallel_logprob_entropy(logits, torch.tensor([3, target]), vocab_size=7)


def test_bad_input_names_the_shapes():
    with pytest.raises(ValueError, match=r"targets of shape \[2\] do not match .* \[3, 4\]"):
        vocab_parallel_logprob_entropy(torch.ones(3, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \[2, 2, 4\], expected \[T, V\]"):
        vocab_parallel_logprob_entropy(torch.ones(2, 2, 4), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        vocab_parallel_logprob_entropy(
            torch.ones(1, 4), torch.zeros(1, dtype=torch.long), temperature=0
        )
    for size in (0, 5):
        with pytest.raises(ValueError, match=f"vocab_size {size} does not fit logits of 4 columns"):
            vocab_parallel_logprob_entropy(
                torch.ones(1, 4), torch.zeros(1, dtype=torch.long), vocab_size=size
            )

"""Bytes per logit of the torch reference, and the counter that finds them."""

import pytest
import torch

from benchmarks.logprob_bytes import ours, plain, reference_operators, run
from benchmarks.traffic import count_traffic
from megatron_dynbatch.logprob import function, reference

ROWS, WIDTH, CACHE = 256, 4096, 2**18


@pytest.fixture
def see_inside(monkeypatch):
    """Our operators as plain functions, in chunks of two rows: 32 kB."""
    monkeypatch.setattr(function, "OPS", reference_operators())
    monkeypatch.setattr(reference, "ROWS_PER_CHUNK", 2)


def test_the_counter_on_operations_of_known_traffic():
    x = torch.randn(ROWS, WIDTH)
    doubled = count_traffic(lambda: x.mul(2.0), CACHE)
    assert doubled.total == doubled.missed == 2 * x.nbytes
    assert count_traffic(lambda: x.view(-1)[3:].view(1, -1), CACHE).total == 0
    row = torch.randn(1024)
    often = count_traffic(lambda: [row.mul_(2.0) for _ in range(10)], CACHE)
    assert often.total == 20 * row.nbytes and often.missed == 2 * row.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_logit_is_read_twice_and_written_once(see_inside, dtype):
    leaf, targets = torch.randn(ROWS, WIDTH).to(dtype), torch.randint(WIDTH, (ROWS,))
    bar = {torch.float32: 14, torch.bfloat16: 8}[dtype]
    for with_gradient in (False, True):
        counted = count_traffic(run(ours, leaf, targets, with_gradient), CACHE)
        assert 3 * leaf.element_size() * 0.99 <= counted.missed / leaf.numel() <= bar
        assert count_traffic(run(plain, leaf, targets, with_gradient), CACHE).missed >= (
            48 * leaf.numel()
        )


def test_masked_rows_cost_their_zeros_alone(see_inside):
    logits, targets = torch.randn(ROWS, WIDTH), torch.randint(WIDTH, (ROWS,))
    mask = torch.arange(ROWS) % 64 < 16  # a quarter
    logits = logits.requires_grad_().view_as(logits)

    def forward():
        return function.vocab_parallel_logprob_entropy(
            logits, targets, mask=mask, entropy="grad", inplace_backward=True
        )

    counted = count_traffic(lambda: forward()[0].detach(), CACHE)
    assert counted.missed <= 0.35 * logits.nbytes
    logp, entropy = forward()
    both = count_traffic(lambda: torch.autograd.grad(logp.sum() + entropy.sum(), logits), CACHE)
    # A quarter is read and written, the rest is written.
    assert both.missed <= 1.35 * logits.nbytes


def test_no_temporary_above_two_chunks(monkeypatch):
    from benchmarks.allocations import peak_bytes

    monkeypatch.setattr(reference, "ROWS_PER_CHUNK", 4)
    chunk = 4 * WIDTH * 4
    for dtype in (torch.float32, torch.bfloat16):
        leaf, targets = torch.randn(ROWS, WIDTH).to(dtype), torch.randint(WIDTH, (ROWS,))
        peak = peak_bytes(run(ours, leaf, targets, True))
        assert peak <= 2 * chunk + 200 * ROWS

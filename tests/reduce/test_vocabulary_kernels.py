"""Log-prob and entropy kernels, run on the host by the emulator, against float64."""

import pytest
import torch

from megatron_dynbatch.logprob import kernels
from megatron_dynbatch.reduce import loader
from tests.logprob.helpers import INF, hard_rows, reference, reference_gradient
from tests.reduce.test_kernels_on_host import ORDERS

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
DTYPES = list(ROUNDING)
BAR = {torch.float32: 14, torch.bfloat16: 8}  # bytes per logit, forward and backward


def run(logits, targets, slopes, keep=None, columns=None, temperature=1.0, parts=1, write=False):
    """logp, entropy and gradient, with the vocabulary in `parts` as on tensor-parallel ranks."""
    columns = logits.shape[1] if columns is None else columns
    scale, width = 1 / temperature, logits.shape[1] // parts
    shards = [part.contiguous() for part in logits.split(width, 1)]
    local = [(targets - i * width, min(max(columns - i * width, 0), width)) for i in range(parts)]
    statistics = torch.stack(
        [
            kernels.statistics(part, target, keep, own, scale, True)
            for part, (target, own) in zip(shards, local, strict=True)
        ]
    )
    logp, entropy, saved = kernels.combine(statistics, keep, scale)
    grads = []
    for part, (target, own) in zip(shards, local, strict=True):
        grad = part if write else kernels.empty_beside(part).fill_(torch.nan)
        kernels.backward(part, target, keep, saved, *slopes, own, scale, grad)
        grads.append(grad)
    return logp, entropy, torch.cat(grads, 1)


def check(logits, targets, temperature=1.0, **how):
    """Compares everything with float64 at the kept rows; elsewhere all is 0."""
    num_rows = len(logits)
    slopes = torch.linspace(-1, 2, num_rows), torch.linspace(3, -1, num_rows)
    logp, entropy, grad = run(logits.clone(), targets, slopes, temperature=temperature, **how)
    keep = how.get("keep")
    kept = torch.ones(num_rows, dtype=torch.bool) if keep is None else keep
    columns = how.get("columns", logits.shape[1])
    assert not logp[~kept].any() and not entropy[~kept].any() and not grad[~kept].any()
    assert not grad[:, columns:].any()
    true = logits[kept, :columns]
    slopes = tuple(slope[kept] for slope in slopes)
    for got, right in zip(
        (logp, entropy), reference(true, targets[kept], temperature), strict=True
    ):
        torch.testing.assert_close(got[kept].double(), right, atol=1e-5, rtol=1e-7)
    right = reference_gradient(true, targets[kept], slopes, temperature)
    torch.testing.assert_close(
        grad[kept, :columns].double(), right, atol=2e-6, rtol=ROUNDING[logits.dtype]
    )
    return grad


def random_rows(num_rows, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, width, generator=generator) * 3).to(dtype)
    return logits, torch.randint(width, (num_rows,), generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 7, 8, 33, 509, 4099])
def test_vocabularies_of_any_size(emulator, dtype, width):
    emulator.take_traffic()
    check(*random_rows(5, width, dtype))
    logits, targets = random_rows(5, width, dtype)
    columns = max(1, width - 3)
    check(logits, targets % columns, columns=columns, temperature=0.7)
    assert emulator.take_traffic()[2] == 0, "misaligned access of 16 bytes"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_hard_rows(emulator, dtype, temperature):
    logits = torch.stack(list(hard_rows(997).values())).to(dtype)
    check(logits, torch.zeros(len(logits), dtype=torch.long), temperature)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_the_vocabulary(emulator, dtype, parts):
    logits, targets = random_rows(6, 4 * 129, dtype)
    logits[0, :258], targets[0] = -INF, 400
    logits[0, 258:] -= 1e4
    check(logits, targets, parts=parts)
    targets.clamp_(max=300)
    logits[0, 0] = 1.0
    check(logits, targets, parts=parts, columns=301)  # of four parts the last is all padding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_in_place_in_every_order(emulator, dtype, order):
    emulator.order, emulator.seed = ORDERS[order], 5
    logits, targets = random_rows(4, 1001, dtype)
    logits[1], targets[1] = torch.nan, -100
    keep = torch.tensor([True, False, True, True])
    grad = check(logits, targets, keep=keep, columns=1000)
    assert torch.equal(grad, check(logits, targets, keep=keep, columns=1000, write=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_starts_anywhere(emulator, dtype):
    logits, targets = random_rows(4, 75, dtype)
    emulator.take_traffic()
    check(logits[1:], targets[1:])
    assert emulator.take_traffic()[2] == 0


def test_no_rows_and_missing_gradients(emulator):
    logits, targets = random_rows(3, 20, torch.float32)
    for shape in run(logits[:0], targets[:0], (None, None)):
        assert shape.shape[0] == 0
    ones, zeros = torch.ones(3), torch.zeros(3)
    assert torch.equal(
        run(logits, targets, (ones, None))[2], run(logits, targets, (ones, zeros))[2]
    )
    assert torch.equal(
        run(logits, targets, (None, ones))[2], run(logits, targets, (zeros, ones))[2]
    )


def test_what_is_wrong_shows(emulator):
    logits, targets = random_rows(4, 40, torch.float32)
    logits[1, 3], logits[2] = torch.nan, -INF
    targets[3] = 40
    logp, entropy, _ = run(logits, targets, (torch.ones(4), torch.ones(4)))
    assert logp[1:3].isnan().all() and entropy[1:3].isnan().all()
    assert logp[3] == -INF and logp[0].isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_per_logit(emulator, dtype):
    """A quarter of a vocabulary of 152064: the bars, and masked rows that are never read."""
    logits, targets = random_rows(3, 38_016, dtype)
    check(logits[:1], targets[:1])
    emulator.take_traffic()
    run(logits, targets, (torch.ones(3), torch.ones(3)), write=True)
    read, written, _ = emulator.take_traffic()
    per_logit = (read + written) / logits.numel()
    assert 3 * logits.element_size() <= per_logit <= BAR[dtype]
    assert emulator.launches[-3:] == [
        f"logprob_statistics_{kernels.DTYPES[dtype]}",
        "logprob_combine",
        f"logprob_backward_{kernels.DTYPES[dtype]}",
    ]
    keep = torch.zeros(3, dtype=torch.bool)
    run(logits, targets, (torch.ones(3), torch.ones(3)), keep=keep, write=True)
    read, written, _ = emulator.take_traffic()
    assert read <= 3 * loader.BLOCK * 4
    assert written <= logits.numel() * logits.element_size() + 3 * loader.BLOCK * 4

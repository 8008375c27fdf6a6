"""The CUDA kernels, run on the host by the emulator, against the torch reference in float64."""

import numpy as np
import pytest
import torch

from megatron_dynbatch.reduce import kernels, ops, reference
from megatron_dynbatch.reduce.segment_table import segment_table

ORDERS = {"by number": 0, "random": 1, "first warp last": 2, "second warp last": 3}
CPU = torch.device("cpu")


def random_batch(num_samples, cp, rank, num_values=2, dtype=torch.float32, longest=60, seed=0):
    """Masks, denominators, table and values of one rank; NaN where no response is."""
    rng = np.random.default_rng((seed, num_samples))
    responses = rng.integers(0, longest + 1, num_samples)
    totals = responses + rng.integers(1, 20, num_samples)
    table = segment_table(totals, responses, cp_size=cp, cp_rank=rank)
    masks = torch.from_numpy(rng.integers(0, 2, responses.sum()).astype(np.uint8))
    denoms = torch.from_numpy(rng.integers(1, 9, num_samples).astype(np.float64))
    values = torch.from_numpy(rng.normal(size=(num_values, responses.sum())))
    x = torch.full((num_values, table.num_tokens), torch.nan, dtype=torch.float64)
    x[:, table.positions] = values[:, table.sources[table.positions]]
    return masks, denoms, table, x.to(dtype)


def run_everything(masks, denoms, table, x):
    """All operators on one batch: kernel results and reference results, by name."""
    index = table.on(CPU)
    count = table.num_samples
    table_arguments = (index.pieces, index.sources, index.samples)
    w = kernels.token_weights(masks, denoms, *table_arguments, table.num_tokens)
    grad = torch.linspace(-1, 1, x.shape[0], dtype=torch.float64)
    per_sample = torch.linspace(-3, 2, x.shape[0] * count, dtype=torch.float64)
    per_sample = per_sample.view(x.shape[0], count)
    both = {"token_weights": (w, reference.token_weights(masks, denoms, *table_arguments[1:]))}
    for name, arguments in {
        "weighted_sums": (x, w),
        "weighted_sums_backward": (grad, w, x.dtype),
        "segment_sums": (x, w, index.pieces, index.samples, count),
        "segment_sums_backward": (grad, per_sample, w, index.pieces, index.samples, x.dtype),
        "exact_sums": (x, w),
        "exact_segment_sums": (x, w, index.pieces, index.samples, count),
    }.items():
        both[name] = getattr(kernels, name)(*arguments), ops._TORCH[name](*arguments)
    # On a device without kernels the definition itself runs, on the host a faster form of it.
    for name, host in (("segment_sums", True), ("segment_sums_backward", False)):
        arguments = (x, w) if host else (grad, per_sample, w)
        rest = (count,) if host else (x.dtype,)
        defined = getattr(reference, name)(*arguments, index.samples, *rest)
        both[f"{name} as defined"] = both[name][0], defined
    return both


def assert_equal(both):
    for name, (got, expected) in both.items():
        for a, b in zip(_tuple(got), _tuple(expected), strict=True):
            if (
                "sums" in name and "back" not in name and "exact" not in name
            ):  # another order of the same float64 sum
                torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13, msg=name)
            else:
                assert torch.equal(a, b), name


def _tuple(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_every_context_parallel_rank(emulator, cp):
    for rank in range(cp):
        assert_equal(run_everything(*random_batch(5, cp, rank)))


@pytest.mark.parametrize("num_samples", [0, 1, 2, 300])
def test_number_of_samples(emulator, num_samples):
    assert_equal(run_everything(*random_batch(num_samples, 2, 1, longest=9)))


@pytest.mark.parametrize("num_values", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17])
def test_number_of_values(emulator, num_values):
    assert_equal(run_everything(*random_batch(3, 2, 0, num_values)))


def test_no_values(emulator):
    _, _, table, x = random_batch(3, 1, 0)
    w = torch.zeros(table.num_tokens, dtype=torch.float64)
    assert kernels.weighted_sums(x[:0], w).shape == (0,)
    assert kernels.weighted_sums_backward(w[:0], w, torch.float32).shape == (0, len(w))


@pytest.mark.parametrize("dtype", list(kernels.DTYPES))
@pytest.mark.parametrize("order", ORDERS)
def test_orders_and_element_types(emulator, dtype, order):
    emulator.order, emulator.seed = ORDERS[order], 5
    # Longer than one tile of 4·64 tokens, so that tiles are added up.
    assert_equal(run_everything(*random_batch(3, 2, 1, 3, dtype, longest=900)))


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_masks_of_every_type(emulator, mask_dtype):
    masks, denoms, table, _ = random_batch(4, 2, 0)
    index = table.on(CPU)
    arguments = (denoms, index.pieces, index.sources, index.samples, table.num_tokens)
    expected = ops._TORCH["token_weights"](masks, *arguments)
    assert torch.equal(kernels.token_weights(masks.to(mask_dtype), *arguments), expected)


def test_every_order_gives_the_same_bits(emulator):
    results = []
    for seed in range(4):
        for order in ORDERS.values():
            emulator.order, emulator.seed = order, seed
            both = run_everything(*random_batch(3, 1, 0, 2, longest=600))
            results.append([both[n][0] for n in ("weighted_sums", "segment_sums")])
    for other in results[1:]:
        assert torch.equal(results[0][0], other[0])
        assert all(torch.equal(a, b) for a, b in zip(results[0][1], other[1], strict=True))


def test_every_packing_gives_the_same_bits(emulator):
    rng = np.random.default_rng(3)
    lengths = [700, 3, 41, 256, 257]
    values = {n: torch.from_numpy(rng.normal(size=(1, n))) for n in lengths}
    sums = {}
    for order in (lengths, lengths[::-1], [257, 700, 3, 256, 41]):
        table = segment_table([n + 5 for n in order], order)
        x = torch.zeros(1, table.num_tokens, dtype=torch.float64)
        x[:, table.positions] = torch.cat([values[n] for n in order], 1)
        w = torch.ones(table.num_tokens, dtype=torch.float64)
        per_sample = kernels.segment_sums(x, w, table.on(CPU).pieces, None, len(order))[1]
        for n, value in zip(order, per_sample[0].tolist(), strict=True):
            assert sums.setdefault(n, value) == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 255, 256, 1021, 1024])
def test_where_memory_begins_changes_no_bit(emulator, dtype, num_tokens):
    # Rows and tensors that start off a multiple of 16 bytes are read element by element.
    table = segment_table([num_tokens + 1], [num_tokens], layout="response")
    pieces = table.on(CPU).pieces
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(3, num_tokens, generator=generator).to(dtype)
    w = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    results = []
    for shift in range(4):
        moved = torch.full((x.numel() + 9,), float("nan"), dtype=dtype)[shift:]
        moved[: x.numel()] = x.reshape(-1)
        weights = torch.full((len(w) + 9,), float("nan"), dtype=torch.float64)[shift:]
        weights[: len(w)] = w
        there = moved[: x.numel()].view_as(x), weights[: len(w)]
        sums = kernels.segment_sums(*there, pieces, None, 1)
        dx = kernels.segment_sums_backward(*sums, there[1], pieces, None, dtype)
        results.append((*sums, kernels.weighted_sums(*there), dx))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_nan_at_masked_positions_and_infinite_gradients_stay_out(emulator):
    x = torch.tensor([[1.0, float("nan"), 3.0, float("inf")]])
    w = torch.tensor([2.0, 0.0, -1.0, 0.0], dtype=torch.float64)
    assert kernels.weighted_sums(x, w).tolist() == [-1.0]
    grad = torch.tensor([float("inf")], dtype=torch.float64)
    dx = kernels.weighted_sums_backward(grad, w, torch.float32)
    assert dx.tolist() == [[float("inf"), 0.0, -float("inf"), 0.0]]


def test_infinite_gradients_stay_out_of_masked_tokens_in_every_implementation(emulator):
    table = segment_table([3, 5], [2, 3])
    index = table.on(CPU)
    w = torch.zeros(8, dtype=torch.float64)
    w[table.positions[1:]] = 1.0
    grad, per_sample = (
        torch.zeros(1, dtype=torch.float64),
        torch.full((1, 2), float("inf")).double(),
    )
    right = torch.where(w != 0, float("inf"), 0.0)[None].float()
    arguments = (grad, per_sample, w, index.pieces, index.samples, torch.float32)
    assert torch.equal(kernels.segment_sums_backward(*arguments), right)
    assert torch.equal(ops._TORCH["segment_sums_backward"](*arguments), right)
    defined = reference.segment_sums_backward(grad, per_sample, w, index.samples, torch.float32)
    assert torch.equal(defined, right)


def test_bfloat16_rounds_as_torch_does(emulator):
    values = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, float("nan")])
    for value in values.double():
        w = torch.ones(1, dtype=torch.float64)
        got = kernels.weighted_sums_backward(value[None], w, torch.bfloat16)
        torch.testing.assert_close(
            got, value.bfloat16()[None, None], rtol=0, atol=0, equal_nan=True
        )


def test_one_launch_each_way(emulator):
    masks, denoms, table, x = random_batch(64, 2, 0, 5)
    index = table.on(CPU)
    w = kernels.token_weights(masks, denoms, index.pieces, None, None, table.num_tokens)
    emulator.launches.clear()
    kernels.weighted_sums(x, w)
    kernels.weighted_sums_backward(torch.ones(5, dtype=torch.float64), w, x.dtype)
    assert len(emulator.launches) == 2
    total, per_sample = kernels.segment_sums(x, w, index.pieces, None, 64)
    kernels.segment_sums_backward(total, per_sample, w, index.pieces, None, x.dtype)
    assert len(emulator.launches) == 4

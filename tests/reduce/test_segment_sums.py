"""Token weights and per-sample sums against plain loops, and what must be bitwise equal."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.reduce import (
    combine,
    limbs_to_float64,
    segment_sums,
    segment_table,
    token_weights,
    weighted_sums,
)

samples_strategy = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=0, max_size=8
)


def batch(shapes, cp, rank, seed, num_values=2, zigzag=True):
    """Masks, denominators, table and values of one rank; values are made per sample, not per rank,
    so that every rank and packing sees the same number at the same token."""
    totals = [prompt + response for prompt, response in shapes]
    responses = [response for _, response in shapes]
    table = segment_table(totals, responses, cp_size=cp, cp_rank=rank, zigzag=zigzag)
    masks, values, denoms = [], [], []
    for prompt, response in shapes:
        rng = np.random.default_rng((seed, prompt, response))
        masks.append(rng.integers(0, 2, response))
        values.append(rng.normal(size=(num_values, response)).astype(np.float32))
        denoms.append(float(rng.integers(1, 9)))
    flat = np.concatenate([*values, np.zeros((num_values, 0), np.float32)], 1)
    x = np.full((num_values, table.num_tokens), np.nan, dtype=np.float32)
    here = table.positions
    x[:, here] = flat[:, table.sources[here]]
    masks = torch.from_numpy(np.concatenate([*masks, np.zeros(0, np.int64)]).astype(np.uint8))
    return masks, torch.tensor(denoms, dtype=torch.float64), table, torch.from_numpy(x), values


@settings(max_examples=25, deadline=None)
@given(samples_strategy, st.sampled_from([1, 2, 4, 8]), st.booleans(), st.integers(0, 999))
def test_sums_over_ranks_are_those_of_the_definition(shapes, cp, zigzag, seed):
    totals, sums = 0, 0
    for rank in range(cp):
        masks, denoms, table, x, values = batch(shapes, cp, rank, seed, zigzag=zigzag)
        w = token_weights(masks, denoms, table)
        total, per_sample = segment_sums(x, w, table)
        assert torch.allclose(total, weighted_sums(x, w), rtol=1e-12, atol=1e-12)
        totals, sums = totals + total, sums + per_sample
    parts = np.split(masks.numpy(), np.cumsum([r for _, r in shapes])[:-1]) if shapes else []
    for i, (x_i, mask) in enumerate(zip(values, parts, strict=True)):
        expected = (x_i.astype(np.float64) * mask).sum(1) / denoms[i].item()
        np.testing.assert_allclose(
            sums[:, i].numpy(), expected, rtol=1e-12, atol=1e-12, equal_nan=False
        )
    np.testing.assert_allclose(
        totals.numpy(), sums.sum(1).numpy(), rtol=1e-12, atol=1e-12, equal_nan=False
    )


def test_contiguous_chunks_by_hand():
    # T = 8, R = 4, C = 2: predictions at positions 3 to 6; rank 0 owns 0 to 3, rank 1 4 to 7.
    tables = [segment_table([8], [4], cp_size=2, cp_rank=r, zigzag=False) for r in range(2)]
    assert [t.positions.tolist() for t in tables] == [[3], [0, 1, 2]]
    assert [t.sources.tolist() for t in tables] == [[4, 4, 4, 0], [1, 2, 3, 4]]
    # Zigzag: rank 0 owns 0, 1, 6, 7 and rank 1 owns 2 to 5.
    tables = [segment_table([8], [4], cp_size=2, cp_rank=r) for r in range(2)]
    assert [t.positions.tolist() for t in tables] == [[2], [1, 2, 3]]
    assert [t.sources.tolist() for t in tables] == [[4, 4, 3, 4], [4, 0, 1, 2]]


def test_pieces_ascend_and_count_tiles():
    table = segment_table([3000, 4, 10], [2500, 0, 9], cp_size=2, cp_rank=0)
    x_offset, mask_offset, length, tile = table.pieces.tolist()
    assert x_offset == sorted(x_offset) and tile == sorted(tile)
    # Rank 0 owns 0 … 749 and 2250 … 2999 of the first sample, predicted at 499 … 2998.
    assert (x_offset[:2], mask_offset[:2], length[:2]) == ([499, 750], [0, 1751], [251, 749])
    assert length[2:] == [0, 0, 3, 0] and tile == [0, 1, 2, 2, 2, 3]


def test_gradients():
    masks, denoms, table, x, _ = batch([(3, 5), (1, 0), (2, 4)], 2, 1, 0)
    w = token_weights(masks, denoms, table)
    x = torch.nan_to_num(x).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: segment_sums(v, w, table), (x,))


def test_float16_values_give_a_float16_gradient():
    masks, denoms, table, x, _ = batch([(3, 5), (2, 4)], 1, 0, 0)
    w = token_weights(masks, denoms, table)
    half = x.half().requires_grad_()
    total, _ = segment_sums(half, w, table)
    assert torch.equal(total, segment_sums(half.detach().float(), w, table)[0])
    total.sum().backward()
    assert half.grad.dtype == torch.float16


def test_nan_at_masked_tokens_changes_nothing():
    masks, denoms, table, x, _ = batch([(3, 5), (2, 4)], 2, 0, 0)
    w = token_weights(masks, denoms, table)
    grads = []
    for junk in (0.0, math.nan, math.inf):
        v = torch.where(w != 0, x, junk).requires_grad_()
        total, per_sample = segment_sums(v, w, table)
        (total.sum() + per_sample.sum()).backward()
        grads.append((total.tolist(), per_sample.tolist(), v.grad.tolist()))
    assert grads[0] == grads[1] == grads[2]


@settings(max_examples=15, deadline=None)
@given(st.permutations([(2, 9), (5, 1), (3, 0), (4, 33), (7, 12)]), st.sampled_from([1, 2, 4]))
def test_sums_of_a_sample_are_bitwise_equal_for_every_packing(order, cp):
    for rank in range(cp):
        alone = {}
        for shape in order:
            masks, denoms, table, x, _ = batch([shape], cp, rank, 7)
            alone[shape] = segment_sums(x, token_weights(masks, denoms, table), table)[1][:, 0]
        masks, denoms, table, x, _ = batch(order, cp, rank, 7)
        together = segment_sums(x, token_weights(masks, denoms, table), table)[1]
        for i, shape in enumerate(order):
            assert together[:, i].tolist() == alone[shape].tolist()


@settings(max_examples=15, deadline=None)
@given(samples_strategy, st.integers(0, 999))
def test_exact_sums_are_bitwise_equal_across_context_parallel_sizes(shapes, seed):
    decoded = []
    for cp in (1, 2, 4, 8):
        totals = torch.zeros(2, 3, dtype=torch.int64)
        sums = torch.zeros(2, len(shapes), 3, dtype=torch.int64)
        plain = torch.zeros(2, dtype=torch.float64)
        for rank in range(cp):
            masks, denoms, table, x, _ = batch(shapes, cp, rank, seed)
            w = token_weights(masks, denoms, table)
            total, per_sample = segment_sums(x, w, table, accumulate="exact")
            assert torch.equal(total, weighted_sums(x, w, accumulate="exact"))
            totals, sums, plain = totals + total, sums + per_sample, plain + weighted_sums(x, w)
        decoded.append((limbs_to_float64(totals).tolist(), limbs_to_float64(sums).tolist()))
        torch.testing.assert_close(limbs_to_float64(totals), plain, rtol=1e-12, atol=1e-13)
    assert all(d == decoded[0] for d in decoded)


def test_limbs_at_their_limits():
    def total(*values):
        x = torch.tensor([values], dtype=torch.float64)
        w = torch.ones(len(values), dtype=torch.float64)
        return limbs_to_float64(weighted_sums(x, w, accumulate="exact")).item()

    assert total(2.0**30, 2.0**-52, -(2.0**30)) == 2.0**-52
    assert total(-0.75, 0.25) == -0.5
    assert total(math.inf, 1.0) == math.inf and total(-math.inf) == -math.inf
    assert total(2.0**31) == math.inf and total(-(2.0**31)) == -math.inf
    assert math.isnan(total(math.nan)) and math.isnan(total(math.inf, -math.inf))
    x = torch.full((1, 100_000), 1 / 3, dtype=torch.float64)
    limbs = weighted_sums(x, torch.ones(100_000, dtype=torch.float64), accumulate="exact")
    many = combine(1000 * limbs)  # as an all-reduce over many micro-batches would leave it
    assert limbs_to_float64(many).item() == pytest.approx(1e8 / 3, rel=1e-15)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, d, t, x, w: token_weights(m[1:], d, t), r"masks have shape \[8\], .* have 9"),
        (lambda m, d, t, x, w: token_weights(m, d[1:], t), "1 denominators .* for 2 samples"),
        (lambda m, d, t, x, w: token_weights(m | 1, d * 0, t), "sample 0 .* denominator is 0"),
        (lambda m, d, t, x, w: segment_sums(x[:, 1:].contiguous(), w[1:], t), "table of 14 tokens"),
        (lambda m, d, t, x, w: segment_sums(x.t().contiguous().t(), w, t), "must be contiguous"),
        (
            lambda m, d, t, x, w: segment_sums(x, w, t, accumulate="float32"),
            "'float64' or 'exact', got 'float32'",
        ),
        (lambda *_: segment_table([4], [2], padded_lengths=[3]), "longer than its padded length"),
        (lambda *_: segment_table([4, 4], [2]), "2 total lengths, 1 response lengths"),
        (
            lambda *_: segment_table([4], [2], padded_lengths=[6], cp_size=2),
            "padded length that 4 does not divide",
        ),
    ],
)
def test_bad_input(call, message):
    masks, denoms, table, x, _ = batch([(3, 5), (2, 4)], 1, 0, 0)
    with pytest.raises(ValueError, match=message):
        call(masks, denoms, table, x, token_weights(masks, denoms, table))

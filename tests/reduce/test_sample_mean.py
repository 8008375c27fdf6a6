"""`get_sum_of_sample_mean` on the golden fixture and against the loop of its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.geometry import zigzag_indices
from megatron_dynbatch.reduce.sample_mean import get_sum_of_sample_mean
from tests import golden


def masks_of(rows, dtype=torch.float32):
    return [torch.tensor(golden.MASKS[i], dtype=dtype) for i in rows]


def pack(values, totals, responses, cp_size, cp_rank, widths=None, junk=float("nan")):
    """A rank's tensor, made the plain way: whole padded sequences, then the zigzag slice."""
    unit = 1 if cp_size == 1 else 2 * cp_size
    widths = [-(-w // unit) * unit for w in (widths or totals)]
    full = np.full(sum(widths), junk, dtype=np.float32)
    start = 0
    for x, total, response, width in zip(values, totals, responses, widths, strict=True):
        first = start + total - response - 1
        full[max(first, 0) : first + response] = x[max(-first, 0) :]
        start += width
    return torch.from_numpy(full[zigzag_indices(np.cumsum([0, *widths]), cp_size, cp_rank)])


def golden_sum(rows, cp_size, cp_rank, denoms=None, **options):
    totals = [golden.TOTALS[i] for i in rows]
    responses = [golden.RESPONSES[i] for i in rows]
    reduce = get_sum_of_sample_mean(
        totals, responses, masks_of(rows), denoms, cp_size=cp_size, cp_rank=cp_rank, **options
    )
    x = pack([golden.VALUES[i] for i in rows], totals, responses, cp_size, cp_rank)
    return reduce(x).item()


@pytest.mark.parametrize(("reduction", "cp"), golden.RANK_SUMS)
def test_golden_rank_sums(reduction, cp):
    denoms = golden.REDUCTIONS[reduction].denoms
    got = [golden_sum(range(4), cp, rank, denoms) for rank in range(cp)]
    assert got == pytest.approx(golden.RANK_SUMS[reduction, cp], rel=1e-15)


@pytest.mark.parametrize("reduction", golden.REDUCTIONS)
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_golden_totals(reduction, cp):
    expected = golden.REDUCTIONS[reduction]
    total = sum(golden_sum(range(4), cp, rank, expected.denoms) for rank in range(cp))
    assert total == pytest.approx(expected.total, rel=1e-15)


@pytest.mark.parametrize("cp", golden.SPLIT_SUMS)
def test_golden_micro_batches(cp):
    denoms = golden.REDUCTIONS["rollout"].denoms
    got = [
        [golden_sum(rows, cp, rank, [denoms[i] for i in rows]) for rows in golden.SPLIT]
        for rank in range(cp)
    ]
    assert got == golden.SPLIT_SUMS[cp]


def test_without_denominators_each_sample_has_its_own_mean():
    assert golden_sum(range(4), 1, 0) == 17.0
    assert sum(golden_sum(range(4), 2, rank) for rank in range(2)) == 17.0


def test_per_token_is_the_plain_masked_sum():
    assert golden_sum(range(4), 1, 0, calculate_per_token_loss=True) == 26.0
    # Denominators lose against it, as in the trainers this name comes from.
    assert golden_sum(range(4), 1, 0, [4, 4, 0, 2], calculate_per_token_loss=True) == 26.0


def test_response_values_without_prompts_in_between():
    x = torch.tensor(sum(golden.VALUES, []))
    reduce = get_sum_of_sample_mean(
        golden.TOTALS, golden.RESPONSES, masks_of(range(4)), golden.REDUCTIONS["rollout"].denoms
    )
    assert reduce(x).item() == 9.0
    assert reduce(x[None]).item() == 9.0


def test_response_of_no_tokens_contributes_nothing():
    masks = [torch.ones(2), torch.zeros(0)]
    reduce = get_sum_of_sample_mean([4, 3], [2, 0], masks)
    assert reduce(torch.tensor([5.0, 7.0])).item() == 6.0
    x = torch.tensor([9.0, 5, 7, 9, 9, 9, 9], requires_grad=True)
    reduce(x).backward()
    assert x.grad.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0]


def test_no_samples():
    assert get_sum_of_sample_mean([], [], [])(torch.zeros(0)).item() == 0.0


def test_a_sample_without_prompt_keeps_its_response_order():
    reduce = get_sum_of_sample_mean([3], [3], [torch.tensor([0.0, 1, 1])])
    assert reduce(torch.tensor([100.0, 1.0, 3.0])).item() == 2.0


sample = st.tuples(st.integers(0, 9), st.integers(1, 12)).flatmap(
    lambda s: st.tuples(
        st.just(s[0] + 1),
        st.lists(st.integers(0, 1), min_size=0, max_size=s[1]),
        st.integers(1, 50),
    )
)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(sample, min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_matches_the_loop_of_the_definition(samples, cp, bshd, seed):
    rng = np.random.default_rng(seed)
    totals = [prompt + len(mask) for prompt, mask, _ in samples]
    responses = [len(mask) for _, mask, _ in samples]
    denoms = [d for *_, d in samples]
    values = [rng.normal(size=r).astype(np.float32) for r in responses]
    masks = [torch.tensor(mask, dtype=torch.uint8) for _, mask, _ in samples]
    widths = [max(totals) + 3] * len(samples) if bshd else None
    expected = sum(
        float((x.astype(np.float64) * np.array(m)).sum()) / d
        for x, (_, m, d) in zip(values, samples, strict=True)
    )
    total, from_response = 0.0, 0.0
    for rank in range(cp):
        make = dict(cp_size=cp, cp_rank=rank)
        if bshd:
            make.update(qkv_format="bshd", max_seq_lens=widths)
        reduce = get_sum_of_sample_mean(totals, responses, masks, denoms, **make)
        x = pack(values, totals, responses, cp, rank, widths)
        total += reduce(x).item()
        owned = pack([np.ones(r) for r in responses], totals, responses, cp, rank, widths, junk=0.0)
        local = x[owned == 1]
        from_response += reduce(local).item()
        # Masks already chunked to this rank give the same number.
        chunked = pack(
            [np.array(m, dtype=np.float32) for _, m, _ in samples],
            totals, responses, cp, rank, widths, junk=0.0,
        )  # fmt: skip
        counts = [int(c) for c in _owned_per_sample(totals, responses, cp, rank, widths)]
        parts = list(chunked[owned == 1].split(counts))
        again = get_sum_of_sample_mean(totals, responses, parts, denoms, **make)
        assert again(x).item() == reduce(x).item()
    assert total == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert from_response == pytest.approx(total, rel=1e-12, abs=1e-12)


def _owned_per_sample(totals, responses, cp, rank, widths):
    index = [np.full(r, i + 1.0) for i, r in enumerate(responses)]
    owner = pack(index, totals, responses, cp, rank, widths, junk=0.0).numpy()
    return [(owner == i + 1).sum() for i in range(len(totals))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([4, 4], [2, 2], [torch.ones(2)] * 2, [3]), "1 sample denominators"),
        (([4, 4], [2], [torch.ones(2)] * 2), "2 total lengths, 1 response lengths"),
        (([4], [2], [torch.ones(3)]), "loss mask of sample 0 has 3 entries, its response has 2"),
        (([4], [2], [torch.ones(2)], [0]), "sample 0 has trained tokens but its denominator is 0"),
        (([4], [5], [torch.ones(5)]), "sample 0 has more response tokens than tokens"),
        (([4], [2], [torch.ones(2)], None, False, "bshd"), "needs 1 max_seq_lens, got none"),
        (([4], [2], [torch.ones(2)], None, False, "sbhd"), "'thd' or 'bshd', got 'sbhd'"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_sum_of_sample_mean(*arguments)


def test_values_of_another_length():
    reduce = get_sum_of_sample_mean([4], [2], [torch.ones(2)])
    with pytest.raises(ValueError, match=r"shape \[3\] do not fit: this rank has 4 or 2 entries"):
        reduce(torch.ones(3))

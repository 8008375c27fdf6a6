"""Packing against a layout written out by hand, and its invariants on random batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dynbatch.layout import pack_samples, stock_batch
from megatron_dynbatch.layout.packed_sequence import COLUMN_FIELDS
from megatron_dynbatch.plan import ParallelLayout, padded_length
from megatron_dynbatch.rollouts import Sample
from tests.layout.helpers import golden_samples

CP2 = ParallelLayout(cp=2)


def pack(samples, rows=None, denoms=None, layout=None, **options):
    rows = list(range(len(samples))) if rows is None else rows
    denoms = np.ones(len(rows), dtype=np.int64) if denoms is None else np.array(denoms)
    return pack_samples(
        dict(enumerate(samples)), rows, denoms, layout or ParallelLayout(), **options
    )


def test_two_samples_by_hand():
    samples = golden_samples(log_probs=[[-1, -2, -3, -4], [-5], [-6, -7], [-8, -9]])
    packed = pack(samples, rows=[3, 1], denoms=[2, 4], layout=CP2, width=16)
    assert packed.tokens.tolist() == [400, 401, 402, 0, *range(200, 206), 0, 0, 0, 0, 0, 0]
    assert packed.labels.tolist() == [401, 402, 0, 0, *range(201, 206), 0, 0, 0, 0, 0, 0, 0]
    assert packed.pack.position_ids.tolist() == [0, 1, 2, 3, *range(8), 0, 1, 2, 3]
    assert packed.padding_mask.tolist() == [False] * 3 + [True] + [False] * 6 + [True] * 6
    assert packed.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert packed.token_weights.tolist() == [0.5, 0.5] + [0] * 6 + [0.25] + [0] * 7
    assert packed.columns["log_probs"].tolist() == [-8, -9] + [0] * 6 + [-5] + [0] * 7
    assert packed.pack.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
    assert packed.pack.cu_seqlens.tolist() == [0, 3, 9, 9]
    assert packed.pack.max_seqlen == 8
    assert packed.sample_rows == (3, 1)
    assert packed.sample_denoms.tolist() == [2, 4]
    assert packed.tokens.dtype == packed.labels.dtype == packed.pack.position_ids.dtype == np.int64
    assert packed.loss_mask.dtype == packed.columns["log_probs"].dtype == np.float32
    assert packed.pack.cu_seqlens.dtype == packed.pack.cu_seqlens_padded.dtype == np.int32


def test_advantage_is_a_number_or_one_per_token():
    samples = golden_samples(advantage=[[1, 2, 3, 4], 0.5, -1.0, 2.0])
    packed = pack(samples, rows=[0, 3])
    assert list(packed.columns) == ["advantages"]
    assert packed.columns["advantages"].tolist() == [0, 0, 1, 2, 3, 4, 0, 2, 2, 0]


def test_tail_is_cut_in_short_sequences():
    packed = pack(golden_samples(), width=300)
    assert np.diff(packed.pack.cu_seqlens_padded).tolist() == [7, 6, 4, 3, 128, 128, 24]
    packed = pack(golden_samples(), layout=ParallelLayout(cp=4), width=32 + 144)
    assert np.diff(packed.pack.cu_seqlens_padded).tolist() == [8, 8, 8, 8, 128, 16]
    # A rank count that 128 is no multiple of: the longest multiple below it.
    packed = pack([], layout=ParallelLayout(cp=3), width=252)
    assert np.diff(packed.pack.cu_seqlens_padded).tolist() == [126, 126]
    packed = pack([], layout=ParallelLayout(cp=128), width=512)
    assert np.diff(packed.pack.cu_seqlens_padded).tolist() == [256, 256]


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (ParallelLayout(), 1),
        (CP2, 4),
        (ParallelLayout(cp=2, tp=2, sequence_parallel=True), 8),
        (ParallelLayout(fp8="mxfp8"), 32),
    ],
)
def test_dummy_is_padding_of_the_smallest_legal_length(layout, size):
    packed = pack([], layout=layout)
    assert packed.tokens.tolist() == [0] * size
    assert packed.padding_mask.all()
    assert not packed.token_weights.any() and not packed.loss_mask.any()
    assert packed.pack.cu_seqlens_padded.tolist() == [0, size]
    assert set(packed.columns) >= {"advantages", "log_probs", "ref_log_probs"}
    assert not any(column.any() for column in packed.columns.values())


def test_stock_batch_contract():
    packed = pack(golden_samples(), rows=[3, 1], layout=CP2, width=16)
    batch = {name: (str(t.dtype), list(t.shape)) for name, t in stock_batch(packed).items()}
    assert batch == {
        "tokens": ("torch.int64", [1, 16]),
        "labels": ("torch.int64", [1, 16]),
        "loss_mask": ("torch.float32", [1, 16]),
        "position_ids": ("torch.int64", [1, 16]),
        "cu_seqlens": ("torch.int32", [1, 4]),
        "cu_seqlens_padded": ("torch.int32", [1, 4]),
        "max_seqlen": ("torch.int32", [1]),
    }
    values = stock_batch(packed)
    assert values["cu_seqlens"].tolist() == values["cu_seqlens_padded"].tolist() == [[0, 4, 12, 16]]
    assert values["max_seqlen"].tolist() == [8]


samples_strategy = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 1), max_size=9)), min_size=1, max_size=7
)


@settings(max_examples=60, deadline=None)
@given(samples_strategy, st.sampled_from([1, 2, 4]), st.integers(0, 40))
def test_matches_one_sample_after_the_other(shapes, cp, spare):
    rng = np.random.default_rng(0)
    layout = ParallelLayout(cp=cp)
    samples = [
        Sample(rng.integers(1, 99, prompt + len(mask)), loss_mask=mask) for prompt, mask in shapes
    ]
    denoms = [3] * len(samples)
    lengths = [int(padded_length(s.total_length, layout)) for s in samples]
    unit = 2 * cp if cp > 1 else 1
    packed = pack(samples, denoms=denoms, layout=layout, width=sum(lengths) + spare * unit)
    start = 0
    for sample, length in zip(samples, lengths, strict=True):
        total, response = sample.total_length, sample.response_length
        here = slice(start, start + length)
        assert packed.tokens[here].tolist() == [*sample.tokens, *[0] * (length - total)]
        mask = np.zeros(length)
        for j in range(response):
            mask[total - response - 1 + j] = sample.loss_mask[j]
            assert (
                packed.labels[start + total - response - 1 + j]
                == sample.tokens[total - response + j]
            )
        assert packed.loss_mask[here].tolist() == mask.tolist()
        assert packed.token_weights[here].tolist() == (mask / 3).tolist()
        assert packed.pack.position_ids[here].tolist() == list(range(length))
        start += length
    tail = np.diff(packed.pack.cu_seqlens_padded)[len(samples) :]
    assert packed.padding_mask.sum() == packed.tokens.size - sum(s.total_length for s in samples)
    assert tail.sum() == spare * unit and (tail <= 128).all() and (tail % unit == 0).all()
    assert len(packed.pack.cu_seqlens) == len(packed.pack.cu_seqlens_padded)


def test_bad_input_names_the_row():
    samples = golden_samples()
    with pytest.raises(ValueError, match="row 7 of the micro-batch has no sample"):
        pack(samples, rows=[0, 7])
    with pytest.raises(ValueError, match="holds 20 tokens as laid out, more than its width 16"):
        pack(samples, width=16)
    with pytest.raises(ValueError, match="width 30 is not a multiple of 4"):
        pack(samples, layout=CP2, width=30)
    with pytest.raises(ValueError, match="row 0 has trained tokens but its denominator is 0"):
        pack(samples, denoms=[0, 1, 0, 1])
    with pytest.raises(ValueError, match="row 0 has no prompt, so nothing predicts its first"):
        pack([Sample([5, 6], loss_mask=[1, 1])])
    with pytest.raises(ValueError, match=r"row 1 \(rollout 0\) has no advantage"):
        pack([*golden_samples(advantage=[1.0] * 4)[:1], samples[1]])
    with pytest.raises(ValueError, match="unknown column 'logprobs'"):
        pack(samples, columns=["logprobs"])


def test_sample_without_prompt_and_sample_without_response():
    packed = pack([Sample([5, 6, 7], loss_mask=[0, 1, 1]), Sample([8, 9], response_length=0)])
    assert packed.loss_mask.tolist() == [1, 1, 0, 0, 0]


def test_weights_of_denominators_one_and_none():
    # Sample C trains nothing, so its rollout may have no denominator at all.
    packed = pack(golden_samples(), rows=[2, 1], denoms=[0, 1])
    assert packed.token_weights.tolist() == [0] * 4 + [0] * 4 + [1, 0]
    with pytest.raises(ValueError):
        pack(golden_samples(), rows=[2, 1], denoms=[1])


def test_a_sample_of_one_token_without_a_prompt_has_nothing_to_predict():
    alone = Sample([9], loss_mask=[0], log_probs=[-5.0])
    after = Sample([1, 2], 1, log_probs=[-6.0])
    packed = pack([alone, after])
    assert packed.columns["log_probs"].tolist() == [0, -6, 0]
    assert packed.loss_mask.tolist() == [0, 1, 0]
    assert packed.labels.tolist() == [0, 2, 0]


def test_a_sample_without_tokens_takes_no_place():
    packed = pack([Sample([], 0), Sample([1, 2], 1)])
    assert packed.tokens.tolist() == [1, 2] and packed.loss_mask.tolist() == [1, 0]
    assert packed.pack.cu_seqlens_padded.tolist() == [0, 0, 2]


def test_every_column_of_a_sample_without_a_prompt_stands_before_its_tokens():
    fields = COLUMN_FIELDS.values()
    whole = {field: [100.0 * n + j for j in range(3)] for n, field in enumerate(fields, 1)}
    after = {field: [7.0] for field in fields}
    packed = pack(
        [Sample([4, 5, 6], loss_mask=[0, 1, 1], **whole), Sample([8, 9], 1, **after)], layout=CP2
    )
    # Nothing predicts the first token, so its entry has no place; token 1 is predicted at 0.
    assert packed.loss_mask.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]
    for n, name in enumerate(COLUMN_FIELDS, 1):
        assert packed.columns[name].tolist() == [100 * n + 1, 100 * n + 2, 0, 0, 7, 0, 0, 0], name

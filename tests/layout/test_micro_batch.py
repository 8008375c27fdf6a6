"""`MicroBatch`: slicing over context parallelism, weighted means, and Megatron's parameters."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_dynbatch.layout import build_micro_batch
from megatron_dynbatch.plan import ParallelLayout
from tests import golden
from tests.layout.helpers import golden_samples, plan_of

SAMPLES = dict(enumerate(golden_samples(log_probs=golden.VALUES)))


def build(micro_batches, k, cp=1, rank=0, reduction="rollout", **options):
    constant = 8.0 if reduction == "constant" else None
    layout = ParallelLayout(dp=len(micro_batches), cp=cp)
    plan = plan_of(list(SAMPLES.values()), micro_batches, layout, reduction, constant)
    return build_micro_batch(plan, 0, 0, k, SAMPLES, cp_rank=rank, **options)


def golden_sums(micro_batches, cp, reduction):
    """Σ w·x [rank][k], the golden values travelling as the column `log_probs`."""
    sums = []
    for rank in range(cp):
        mbs = [build(micro_batches, k, cp, rank, reduction) for k in range(len(micro_batches[0]))]
        sums.append([mb.mean(mb.column("log_probs")).item() for mb in mbs])
    return sums


@pytest.mark.parametrize(("reduction", "cp"), golden.RANK_SUMS)
def test_golden_rank_sums(reduction, cp):
    got = [row[0] for row in golden_sums([[[0, 1, 2, 3]]], cp, reduction)]
    assert got == pytest.approx(golden.RANK_SUMS[reduction, cp], rel=1e-15)


@pytest.mark.parametrize("cp", golden.SPLIT_SUMS)
def test_golden_micro_batches(cp):
    assert golden_sums([golden.SPLIT], cp, "rollout") == golden.SPLIT_SUMS[cp]


@pytest.mark.parametrize("reduction", golden.REDUCTIONS)
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 1], [0, 2], []]])
def test_golden_loss_for_every_split(reduction, cp, split):
    total = sum(map(sum, golden_sums([split], cp, reduction)))
    expected = golden.REDUCTIONS[reduction]
    assert total / expected.loss_denominator == pytest.approx(expected.loss, rel=1e-15)


def test_slices_of_all_ranks_are_the_full_sequence():
    full = build([[[0, 1, 2, 3]]], 0, cp=1)
    parts = [build([[[0, 1, 2, 3]]], 0, cp=2, rank=r, width=40) for r in range(2)]
    assert [p.num_tokens for p in parts] == [20, 20]
    tokens = torch.cat([p.tokens[~p.padding_mask] for p in parts])
    assert sorted(tokens.tolist()) == sorted(full.tokens[0].tolist())
    for part in parts:
        assert part.cu_seqlens_padded.tolist() == [0, 8, 16, 20, 24, 40]
        assert part.max_seqlen == 16
        assert part.loss_mask.shape == part.columns["log_probs"].shape == (1, 20)
        assert part.token_weights.shape == (20,)
    # Sample A is 8 tokens long as laid out: rank 1 owns its positions 2 to 5.
    assert parts[1].tokens[0, :4].tolist() == [102, 103, 104, 105]
    assert parts[1].labels[0, :4].tolist() == [103, 104, 105, 106]


def test_segments_give_the_sums_per_sample():
    from megatron_dynbatch.reduce import segment_sums

    total, per_sample = 0, 0
    for rank in range(2):
        mb = build([[[0, 1, 2, 3]]], 0, cp=2, rank=rank)
        t, s = segment_sums(mb.columns["log_probs"], mb.token_weights, mb.segments)
        total, per_sample = total + t, per_sample + s
    assert total.tolist() == [9.0]
    assert per_sample.tolist() == [[1.5, 2.5, 0.0, 5.0]]


@pytest.mark.parametrize("shape", [(20,), (1, 20), (20, 1)])
def test_mean_takes_every_usual_shape(shape):
    mb = build([[[0, 1, 2, 3]]], 0)
    x = mb.column("log_probs").reshape(shape).clone().requires_grad_()
    mb.mean(x).backward()
    assert x.grad.reshape(-1).tolist() == pytest.approx(mb.token_weights.tolist())


def test_mean_takes_booleans_and_ignores_nan_at_masked_tokens():
    mb = build([[[3]]], 0, reduction="token")
    assert mb.mean(torch.tensor([True, True, True])).item() == 2.0
    x = torch.tensor([1.0, 2.0, float("nan")], requires_grad=True)
    mb.mean(x).backward()
    assert x.grad.tolist() == [1.0, 1.0, 0.0]


def test_wrong_shape_names_both():
    mb = build([[[3]]], 0)
    with pytest.raises(ValueError, match=r"entropy has shape \[2\], expected .* \[3\], \[1, 3\]"):
        mb.sums({"entropy": torch.ones(2)})


def test_several_sums_in_one_call_keep_each_dtype_exact():
    mb = build([[[3]]], 0, reduction="token")
    fine = torch.tensor([1.0 + 2**-40, 0.0, 0.0], dtype=torch.float64)
    sums = mb.sums({"fine": fine, "coarse": torch.ones(3, dtype=torch.bfloat16)})
    assert sums["fine"].item() == 1.0 + 2**-40
    assert sums["coarse"].item() == 2.0
    assert mb.sums({}) == {}


def test_dummy_adds_nothing():
    mb = build([[[0, 1, 2, 3], []]], 1)
    assert mb.is_dummy and mb.num_tokens == 1
    x = torch.tensor([float("nan")], requires_grad=True)
    mb.mean(x).backward()
    assert mb.mean(x).item() == 0.0 and x.grad.tolist() == [0.0]
    assert mb.column("log_probs").tolist() == [0.0]


def test_missing_column_names_those_there():
    with pytest.raises(ValueError, match="no ref_log_probs; columns: log_probs"):
        build([[[0]]], 0).column("ref_log_probs")


def test_packed_seq_params_hold_laid_out_lengths():
    pytest.importorskip("megatron.core")
    mb = build([[[0, 3]]], 0, cp=2)
    params = mb.packed_seq_params()
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        value = getattr(params, name)
        assert value.tolist() == [0, 8, 12] and value.dtype == torch.int32
    assert (params.qkv_format, params.max_seqlen_q, params.max_seqlen_kv) == ("thd", 8, 8)
    assert type(params.max_seqlen_q) is int


def test_weights_are_exact_to_float64():
    mb = build([[[0, 1, 2, 3]]], 0, reduction="sample")
    assert mb.token_weights.dtype == torch.float64
    assert set(mb.token_weights.tolist()) == {0.0, np.float64(1) / 3, 1.0, 0.5}


def test_places_and_positions_of_local_tokens():
    # A, D and C are 8, 4 and 4 tokens long as laid out, then 8 of padding; rank 0 has the ends.
    places, positions = build([[[0, 3, 2]]], 0, cp=2, width=24).sample_positions()
    assert places.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert positions.tolist() == [0, 1, 6, 7, 0, 3, 0, 3, 0, 1, 6, 7]
    places, positions = build([[[0, 3, 2]]], 0, cp=2, rank=1, width=24).sample_positions()
    assert places.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert positions.tolist() == [2, 3, 4, 5, 1, 2, 1, 2, 2, 3, 4, 5]


def test_untrained_is_where_the_mask_is_0():
    mb = build([[[0]]], 0)
    assert mb.untrained.tolist() == [[True, True, False, False, True, False, True]]
    assert mb.untrained.dtype == torch.bool


def test_what_was_summed_last_is_kept_by_name_and_not_handed_on():
    mb = build([[[3]]], 0)
    x = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    mb.sums({"loss": x, "kl": torch.tensor([4.0, 5.0, 6.0])})
    mb.mean(torch.tensor([7, 8, 9]))
    assert {name: kept.tolist() for name, kept in mb.summed.items()} == {
        "loss": [1, 2, 3], "kl": [4, 5, 6], "x": [7, 8, 9]
    }  # fmt: skip
    assert not mb.summed["loss"].requires_grad
    assert dataclasses.replace(mb, dp_rank=1).summed == {}


def test_it_shows_neither_sums_nor_what_is_private():
    mb = build([[[3]]], 0)
    mb.mean(torch.ones(3))
    assert "summed" not in repr(mb) and "_padded_lengths" not in repr(mb)


def test_the_first_context_parallel_rank_is_meant_where_none_is_given():
    plan = plan_of(list(SAMPLES.values()), [[[0]]], ParallelLayout(cp=2))
    mb = build_micro_batch(plan, 0, 0, 0, SAMPLES)
    assert mb.cp_rank == 0 and mb.tokens.tolist() == [[100, 101, 106, 0]]


def test_tensors_go_to_the_device():
    mb = build([[[0, 1]]], 0, cp=2, device="meta")
    tensors = [mb.tokens, mb.labels, mb.loss_mask, mb.token_weights, mb.cu_seqlens_padded]
    assert {t.device.type for t in [*tensors, *mb.columns.values()]} == {"meta"}
    assert build([[[0, 1]]], 0, device="cpu").tokens.device.type == "cpu"

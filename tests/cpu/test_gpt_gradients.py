"""A real GPTModel has the same gradients whole and split over context-parallel ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_dynbatch.geometry import zigzag_indices
from tests.pool import run_ranks

LENGTHS = [8, 16, 24, 16]
VOCABULARY = 32


def gradients(cp_size: int) -> dict[str, Tensor]:
    """Gradients of Σ weights · logits, summed over the ranks, in float64.

    Logits and not Megatron's loss: its cross entropy computes in float32 whatever the model.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.packed_seq_params import PackedSeqParams

    mpu.initialize_model_parallel(context_parallel_size=cp_size)
    model = build_model(cp_size)
    bounds = np.cumsum([0, *LENGTHS])
    mine = torch.from_numpy(zigzag_indices(bounds, cp_size, mpu.get_context_parallel_rank()))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    packing = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (1, sum(LENGTHS)), generator=random)
    weights = torch.randn(1, sum(LENGTHS), VOCABULARY, generator=random, dtype=torch.float64)
    logits = model(tokens[:, mine], None, None, packed_seq_params=packing)
    (logits * weights[:, mine]).sum().backward()
    result = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)
        result[name] = parameter.grad
    return result


def build_model(cp_size: int) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.cpu.weights import overwrite_weights

    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=32,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=cp_size,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=sum(LENGTHS),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).double()
    overwrite_weights([model], seed=7)
    return model


def test_context_parallel_gradients_equal_the_whole() -> None:
    (whole,) = run_ranks(1, gradients, 1)
    assert len(whole) > 10
    for split in run_ranks(2, gradients, 2):
        for name, want in whole.items():
            torch.testing.assert_close(split[name], want, rtol=1e-10, atol=1e-10, msg=name)

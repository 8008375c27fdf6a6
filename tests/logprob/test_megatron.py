"""Log-probs of the real GPTModel: equal to Megatron's own cross entropy, with less memory."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.allocations import peak_bytes
from megatron_dynbatch.layout import MicroBatch, build_micro_batch
from megatron_dynbatch.logprob import reference
from megatron_dynbatch.losses import ChunkedHead, model_output, policy, sft, token_log_probs
from megatron_dynbatch.plan import ParallelLayout
from megatron_dynbatch.rollouts import Sample
from tests.layout.helpers import plan_of
from tests.pool import run_ranks

VOCAB, HIDDEN = 4096, 16


def micro_batch(tp: int, cp: int, cp_rank: int) -> MicroBatch:
    random = np.random.default_rng(0)
    samples = []
    for total, response in ((40, 30), (90, 40), (62, 3), (60, 57)):
        values = random.normal(size=(2, response))
        samples.append(
            Sample(
                random.integers(0, VOCAB - 96, total),
                loss_mask=(random.random(response) < 0.9).astype(int),
                log_probs=values[0],
                advantage=values[1],
            )
        )
    layout = ParallelLayout(dp=1, tp=tp, cp=cp, sequence_parallel=tp > 1)
    plan = plan_of(samples, [[range(4)]], layout)
    return build_micro_batch(plan, 0, 0, 0, dict(enumerate(samples)), cp_rank=cp_rank)


def build_model(tp: int, cp: int, bf16: bool, sequence_parallel: bool) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.cpu.weights import overwrite_weights

    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, ffn_hidden_size=32,
        normalization="RMSNorm", add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        tensor_model_parallel_size=tp, context_parallel_size=cp, bf16=bf16, params_dtype=dtype,
        sequence_parallel=sequence_parallel, use_cpu_initialization=True, pipeline_dtype=dtype,
        persist_layer_norm=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=512,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    overwrite_weights([model], seed=7)
    return Float16Module(config, model) if bf16 else model


def gradients(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any("output_layer" in n for n in found) and len(found) > 5
    return {name: grad.clone() for name, grad in found.items()}


def assert_near(got: dict[str, Tensor], right: dict[str, Tensor], bound: float) -> None:
    for name, grad in right.items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(got[name], grad, rtol=bound, atol=bound * scale, msg=name)


def job(tp: int, cp: int, bf16: bool, sequence_parallel: bool) -> dict[str, float]:
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    mpu.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    group = mpu.get_tensor_model_parallel_group()
    batch = micro_batch(tp, cp, mpu.get_context_parallel_rank())
    model = build_model(tp, cp, bf16, sequence_parallel)
    mask = batch.loss_mask[0] != 0

    def output(**arguments: Any) -> Tensor:
        return model_output(model, batch, **arguments)

    logits = output()
    assert logits.dtype == (torch.bfloat16 if bf16 else torch.float32)
    assert logits.shape == (1, batch.num_tokens, VOCAB // tp)

    # The same numbers as Megatron's own cross entropy of the same logits.
    theirs = output(labels=batch.labels)
    right = gradients(model, sft(theirs, batch)[0])
    ours, _ = token_log_probs(logits, batch, tp_group=group)
    torch.testing.assert_close(ours[mask], -theirs[0][mask].float(), rtol=0, atol=1e-5)
    assert mask.any() and not ours[~mask].any()
    bound = 3e-2 if bf16 else 1e-5
    for in_place in (False, True):
        loss, _ = sft(output(), batch, tp_group=group, inplace_backward=in_place)
        assert_near(gradients(model, loss), right, bound)

    # The head in chunks of seven rows: the same loss, metrics and gradients.
    options: dict[str, Any] = dict(temperature=0.7, vocab_size=VOCAB - 96)
    head = ChunkedHead(**options, entropy="grad", tp_group=group, rows_per_chunk=7)
    both = [
        policy(each, batch, tp_group=group, entropy_coef=0.3, **options)
        for each in (output(), output(chunked_head=head))
    ]
    for name, value in both[0][1].items():
        torch.testing.assert_close(both[1][1][name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert_near(gradients(model, both[1][0]), gradients(model, both[0][0]), bound)
    with pytest.raises(ValueError, match="the loss asks for temperature 1.0 and vocab_size None"):
        policy(output(chunked_head=head), batch, tp_group=group)
    return memory(output, batch, group) if tp * cp > 1 else {}


def memory(output: Any, batch: MicroBatch, group: dist.ProcessGroup) -> dict[str, float]:
    """Peak bytes per local logit from the model's output layer to the gradient of its logits."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def loss_stage(ours: bool) -> float:
        logits = output().detach().requires_grad_() * 1

        def run() -> None:
            if ours:
                logp, entropy = token_log_probs(
                    logits, batch, entropy="metric", tp_group=group, inplace_backward=True
                )
                assert entropy is not None
            else:  # as trainers do: float32 logits, cross entropy, and the entropy beside it
                wide = logits.float().transpose(0, 1)
                with torch.no_grad():
                    p = torch.softmax(wide, -1)
                    (torch.logsumexp(wide, -1) - (p * wide).sum(-1)).sum()
                # Megatron's function overwrites float32 logits.
                wide = wide.clone() if logits.dtype == torch.float32 else wide
                logp = -vocab_parallel_cross_entropy(wide, batch.labels.T, 0.0, group)[:, 0]
            torch.autograd.grad((logp * batch.loss_mask[0]).sum(), logits)

        return peak_bytes(run) / logits.numel()

    chunk = reference.rows_per_chunk(VOCAB // dist.get_world_size(group), torch.device("cpu"))
    return {
        "ours": loss_stage(True),
        "theirs": loss_stage(False),
        "two chunks": 2 * min(chunk / batch.num_tokens, 1.0) * 4,
    }


@pytest.mark.parametrize(
    ("tp", "cp", "bf16", "sequence_parallel"),
    [(1, 1, False, False), (2, 1, False, False), (2, 1, True, True), (1, 2, True, False)],
)
def test_log_probs_of_a_real_model(
    tp: int, cp: int, bf16: bool, sequence_parallel: bool
) -> None:
    for found in run_ranks(tp * cp, job, tp, cp, bf16, sequence_parallel):
        if found:
            # Beside the chunks only some numbers a row.
            assert found["ours"] < found["two chunks"] + 0.1
            assert found["theirs"] >= 8

"""Forward-only passes of a real Megatron GPT: the same log-probs under every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dynbatch.plan import ParallelLayout, PlanError, PlanOptions, make_plan
from megatron_dynbatch.rollouts import RolloutQueue, Sample, SampleIndex
from megatron_dynbatch.steps import StepFeed, run_forward_only, with_fields
from megatron_dynbatch.steps.forward_only import plan_forward_pass
from tests.pool import run_ranks

VOCABULARY = 32


def samples(count: int = 13) -> list[Sample]:
    rng = np.random.default_rng(5)
    drawn = []
    for row in range(count):
        length = int(rng.integers(2, 14))
        response = int(rng.integers(0, length))
        drawn.append(Sample(rng.integers(0, VOCABULARY, length), response, rollout_id=row // 2))
    return drawn


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=3),
        ParallelLayout(dp=8),
        ParallelLayout(dp=2, cp=2),
        ParallelLayout(dp=2, pp=2, vpp=2),
        ParallelLayout(dp=2, pp=2, vpp=2, vpp_group=3),
    ],
)
@pytest.mark.parametrize("cap", [16, 1000])
def test_each_rank_keeps_its_samples_under_the_larger_cap(layout: ParallelLayout, cap: int) -> None:
    index = SampleIndex.from_samples(samples(40))
    plan = make_plan(index, layout, PlanOptions(max_tokens_per_gpu=16, rollouts_per_step=9))
    (step,) = plan_forward_pass(plan, cap, first_step=1).steps
    assert layout.admits(step.num_microbatches)
    # B of the pass is that of all its rollouts.
    assert step.loss_denominator == sum(s.loss_denominator for s in plan.steps[1:])
    for rank, micro_batches in enumerate(step.micro_batches):
        own = [r for s in plan.steps[1:] for rows in s.micro_batches[rank] for r in rows]
        assert sorted(row for rows in micro_batches for row in rows) == sorted(own)
        for rows in micro_batches:
            padded = -(-index.total_lengths[list(rows)] // layout.sample_multiple)
            assert padded.sum() * layout.sample_multiple <= cap * layout.cp
        # Dummies only where there are fewer samples than micro-batches.
        num_dummies = sum(not rows for rows in micro_batches)
        assert num_dummies == max(0, step.num_microbatches - len(own))
    if cap == 1000:
        assert step.num_microbatches == layout.next_admissible(1)
    with pytest.raises(PlanError, match="none is left"):
        plan_forward_pass(plan, cap, first_step=len(plan.steps))


def log_probs(cp: int = 1, pp: int = 1, vpp: int = 1) -> dict[int, list[float]]:
    """Row → log-probs of its response, as this rank got them."""
    from megatron.core import parallel_state as mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mpu.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=cp,
    )
    model = build_model(cp, pp, vpp)
    dp = mpu.get_data_parallel_world_size()
    queue = RolloutQueue()
    queue.write(samples())
    feed = StepFeed(
        queue,
        ParallelLayout(dp=dp, cp=cp, pp=pp, vpp=vpp),
        PlanOptions(max_tokens_per_gpu=16 // cp, rollouts_per_step=4),
        dp_rank=mpu.get_data_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
    )
    results: dict[int, Tensor] = {}

    def forward_step(batch: Any, chunk: Any) -> tuple[Tensor, Any]:
        output = chunk(
            batch.tokens, batch.position_ids, None, labels=batch.labels,
            packed_seq_params=batch.packed_seq_params(),
        )  # fmt: skip
        return output, torch.neg

    def add_log_probs(batch: Any) -> dict[int, Sample]:
        results.update(
            run_forward_only(
                batch, model, forward_step, get_forward_backward_func(), max_tokens_per_gpu=40,
                dp_rank=feed.config.dp_rank, cp_rank=feed.config.cp_rank,
                cp_group=mpu.get_context_parallel_group(),
            )
        )  # fmt: skip
        return with_fields(batch.samples, log_probs=results)

    feed.on_batch_opened = add_log_probs
    step = feed.open_step()
    assert step is not None
    if results:
        assert step.micro_batch(0).column("log_probs").abs().sum() > 0
    return {row: values.tolist() for row, values in results.items()}


def build_model(cp: int, pp: int, vpp: int) -> list[torch.nn.Module]:
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.cpu.weights import overwrite_weights

    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        context_parallel_size=cp,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        overlap_p2p_comm=vpp > 1,
        batch_p2p_comm=vpp == 1,
        moe_token_dispatcher_type="alltoall",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
    )
    chunks = []
    for stage in range(vpp):
        where = {"ignore_virtual": False, "vp_stage": stage} if vpp > 1 else {}
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=VOCABULARY,
                max_sequence_length=64,
                pre_process=mpu.is_pipeline_first_stage(**where),
                post_process=mpu.is_pipeline_last_stage(**where),
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                vp_stage=stage if vpp > 1 else None,
            )
        )
    overwrite_weights(chunks, 7)
    return chunks


@pytest.fixture(scope="module")
def alone() -> dict[int, list[float]]:
    (found,) = run_ranks(1, log_probs)
    return found


def test_results_stand_in_sample_order(alone: dict[int, list[float]]) -> None:
    assert list(alone) == list(range(13))
    assert [len(values) for values in alone.values()] == [s.response_length for s in samples()]


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {}),
        (2, {"cp": 2}),
        (2, {"pp": 2}),
        (2, {"pp": 2, "vpp": 2}),
    ],
)
def test_every_layout_gives_the_same(
    alone: dict[int, list[float]], size: int, layout: dict[str, int]
) -> None:
    ranks = run_ranks(size, log_probs, **layout)
    together: dict[int, list[float]] = {}
    for found in ranks:
        assert list(found) == sorted(found)
        for row, values in found.items():
            assert values == pytest.approx(alone[row], abs=2e-6)
            together[row] = values
    assert sorted(together) == list(range(13))
    if layout.get("pp", 1) > 1:
        assert ranks[0] == {}  # not the last stage

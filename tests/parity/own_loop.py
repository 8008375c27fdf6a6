"""A training loop of its own on megatron.core and the package's plain functions, in float64.

No megatron.training, no hooks: what `examples/own_loop_mcore.py` shows, with the suite's
architecture and recipe, and under any layout without virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.losses import megatron_loss, sft
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory
from megatron_dynbatch.steps import Exchange, Step, StepFeed
from tests.parity.architecture import Architecture
from tests.parity.job import Observed, observe_optimizer, set_parameters
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe
from tests.parity.rollouts import CAPACITY


def train(path: Path, sizes: Layout, recipe: Recipe, total: int) -> Observed:
    """Train on this rank until the rollouts end.

    Args:
        path: Rollout directory; each batch is a step.
        sizes: The layout.
        recipe: How.
        total: Rollouts of the whole run, for the weight-decay schedule.
    """
    from megatron.core import mpu
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
    )
    model_parallel_cuda_manual_seed(1234)
    architecture, observed = Architecture(), Observed()
    model = build_model(architecture, sizes)
    set_parameters([model], architecture.initial_parameters())
    optimizer = build_optimizer(recipe, model)
    observe_optimizer(observed, [model], optimizer)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.learning_rate,
        min_lr=recipe.min_learning_rate,
        lr_warmup_steps=recipe.warmup,
        lr_decay_steps=recipe.decay,
        lr_decay_style="linear",
        start_wd=recipe.weight_decay,
        end_wd=recipe.end_weight_decay or recipe.weight_decay,
        wd_incr_steps=total,
        wd_incr_style="linear" if recipe.end_weight_decay else "constant",
    )
    feed = build_feed(path, sizes, recipe)
    while (step := feed.open_step()) is not None:
        row = train_step(step, feed.layout, model, optimizer)
        scheduler.step(increment=feed.finish_step())
        row["learning_rate"] = optimizer.param_groups[0]["lr"]
        row["consumed"] = feed.cursor.consumed_rollouts
        observed.rows.append({"iteration": len(observed.rows) + 1, **row})
    return observed


def build_feed(path: Path, sizes: Layout, recipe: Recipe) -> StepFeed:
    """Steps of one batch each, in micro-batches of their own width."""
    from megatron.core import mpu

    layout = ParallelLayout(dp=sizes.dp, cp=sizes.cp, tp=sizes.tp, pp=sizes.pp)
    options = PlanOptions(max_tokens_per_gpu=CAPACITY // sizes.cp, loss_reduction=recipe.reduction)
    return StepFeed(
        RolloutDirectory(path),
        layout,
        options,
        dp_rank=mpu.get_data_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        exchange=Exchange.of_job(timeout=60.0, name="own loop"),
    )


def build_model(architecture: Architecture, sizes: Layout) -> Any:
    """This pipeline stage, wrapped for data parallelism."""
    from megatron.core import mpu
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.query_groups,
        ffn_hidden_size=architecture.ffn,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        context_parallel_size=sizes.cp,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths
        use_cpu_initialization=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=architecture.vocab,
        max_sequence_length=512,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).double()
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def build_optimizer(recipe: Recipe, model: Any) -> Any:
    """Megatron's AdamW."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        lr=recipe.learning_rate,
        min_lr=recipe.min_learning_rate,
        weight_decay=recipe.weight_decay,
        clip_grad=recipe.clip_grad,
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        adam_eps=recipe.epsilon,
    )
    return get_megatron_optimizer(config, [model])


def train_step(step: Step, layout: ParallelLayout, model: Any, optimizer: Any) -> dict[str, float]:
    """One optimizer step; its gradient norm and, on the last stage, its loss."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches)
        output = model(
            batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params()
        )
        return output, partial(scaled_loss, batch, layout)

    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=(step.micro_batch(k) for k in range(step.num_microbatches)),
        model=[model],
        num_microbatches=step.num_microbatches,
        seq_length=1,
        micro_batch_size=1,
    )
    _, grad_norm, _ = optimizer.step()
    row = {"grad_norm": float(grad_norm) if grad_norm is not None else float("nan")}
    if mpu.is_pipeline_last_stage():
        total = torch.stack([report["lm loss"] for report in reports]).sum(0)
        dist.all_reduce(total, group=mpu.get_data_parallel_group(with_context_parallel=True))
        row["lm loss"] = (total[0] / total[1]).item()
    return row


def scaled_loss(
    batch: MicroBatch, layout: ParallelLayout, output: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The cross entropy as Megatron is to be given it."""
    from megatron.core import mpu

    local_sum, report = sft(output, batch, tp_group=mpu.get_tensor_model_parallel_group())
    loss, num_tokens, count = megatron_loss(
        local_sum, batch.step, layout, calculate_per_token_loss=False
    )
    pair = torch.stack([report["lm loss"], torch.full_like(local_sum, count).detach()])
    return loss, num_tokens, {"lm loss": pair}

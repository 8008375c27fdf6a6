r"""A training loop of one's own on megatron.core, without megatron.training and without hooks.

The step feed says which rollouts make the next step and hands out its micro-batches; the loss is
scaled by a plain function. Everything else is ordinary megatron.core.

    torchrun --nproc-per-node 2 -m megatron_dynbatch.run --cpu examples/own_loop_mcore.py \
        --rollout-path DIR --rollouts-per-step 8 --max-tokens-per-gpu 1024 --vocab-size 128

Real size, some 7B parameters in bfloat16 on 8 GPUs with Transformer Engine:

    torchrun --nproc-per-node 8 examples/own_loop_mcore.py \
        --rollout-path /shared/rollouts --rollouts-per-step 64 --max-tokens-per-gpu 8192 \
        --pipeline-size 4 --vocab-size 128256 --num-layers 48 --hidden-size 4096 \
        --num-attention-heads 32 --lr 1e-5 --lr-decay-rollouts 100000
"""

import argparse
import os

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_dynbatch import RolloutDirectory
from megatron_dynbatch.losses import megatron_loss, sft
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.steps import Exchange, StepFeed
from megatron_dynbatch.wording import counted


def parse_arguments(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--rollout-path", required=True, metavar="DIR")
    add("--rollouts-per-step", type=int, help="default: each batch is one step")
    add("--max-tokens-per-gpu", type=int, required=True)
    add("--pipeline-size", type=int, default=1)
    add("--vocab-size", type=int, required=True)
    add("--num-layers", type=int, default=2)
    add("--hidden-size", type=int, default=64)
    add("--num-attention-heads", type=int, default=4)
    add("--lr", type=float, default=1e-3)
    add("--lr-decay-rollouts", type=int, default=1000, help="horizon of the LR, in rollouts")
    return parser.parse_args(argv)


def on_cpu():
    """Whether this runs under the CPU runner."""
    return torch.empty(0, device="cuda").is_cpu


def parameter_dtype():
    """Attention over packed sequences needs half precision on a GPU."""
    return torch.float32 if on_cpu() else torch.bfloat16


def build_model(args):
    """This pipeline stage of a GPT, wrapped for data parallelism."""
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        ffn_hidden_size=2 * args.hidden_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=args.pipeline_size,
        bf16=not on_cpu(),
        params_dtype=parameter_dtype(),
        pipeline_dtype=parameter_dtype(),
        # Micro-batches have their own lengths; Megatron wants this dispatcher then.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=on_cpu(),
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm")
        if on_cpu()
        else get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=args.vocab_size,
        max_sequence_length=args.max_tokens_per_gpu,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda()
    if config.bf16:
        model = Float16Module(config, model)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def build_optimizer(args, model):
    """Adam, and a schedule that counts rollouts."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=args.lr,
            min_lr=0.0,
            weight_decay=0.0,
            bf16=not on_cpu(),
            params_dtype=parameter_dtype(),
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=args.lr_decay_rollouts,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=args.lr_decay_rollouts,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def build_feed(args):
    """The source of steps: rollouts, the layout they are planned for, and the caps."""
    layout = ParallelLayout(dp=mpu.get_data_parallel_world_size(), pp=args.pipeline_size)
    options = PlanOptions(
        max_tokens_per_gpu=args.max_tokens_per_gpu, rollouts_per_step=args.rollouts_per_step
    )
    return StepFeed(
        RolloutDirectory(args.rollout_path),
        layout,
        options,
        dp_rank=mpu.get_data_parallel_rank(),
        exchange=Exchange.of_job(timeout=300.0, name="own loop"),
        device="cuda",
    )


def train_step(step, layout, model, optimizer, scheduler):
    """One optimizer step; returns its loss (on the last pipeline stage) and gradient norm."""

    def forward_step(micro_batches, model):
        batch = next(micro_batches)
        output = model(
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            packed_seq_params=batch.packed_seq_params(),
        )

        def loss_function(output):
            local_sum, _ = sft(output, batch)
            loss, num_tokens, _ = megatron_loss(
                local_sum, batch.step, layout, calculate_per_token_loss=False
            )
            return loss, num_tokens, {"loss": local_sum.detach()}

        return output, loss_function

    model.zero_grad_buffer()
    optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=(step.micro_batch(k) for k in range(step.num_microbatches)),
        model=[model],
        num_microbatches=step.num_microbatches,
        seq_length=1,  # lengths are exchanged with each message
        micro_batch_size=1,
    )
    updated, grad_norm, _ = optimizer.step()
    if updated:
        scheduler.step(increment=step.step_global_batch_size)
    loss = sum((report["loss"] for report in reports), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(loss, group=mpu.get_data_parallel_group())
    return loss.item() / step.step_plan.loss_denominator, grad_norm


def train(args, prepare=lambda model, optimizer: None):
    """Train until the rollouts end; returns one record per step."""
    mpu.initialize_model_parallel(pipeline_model_parallel_size=args.pipeline_size)
    model_parallel_cuda_manual_seed(1234)
    model = build_model(args)
    optimizer, scheduler = build_optimizer(args, model)
    prepare(model, optimizer)
    feed = build_feed(args)
    records = []
    while (step := feed.open_step()) is not None:
        loss, grad_norm = train_step(step, feed.layout, model, optimizer, scheduler)
        size = feed.finish_step()
        learning_rate = optimizer.param_groups[0]["lr"]
        records.append((size, loss, grad_norm, learning_rate))
        if mpu.is_pipeline_last_stage() and mpu.get_data_parallel_rank() == 0:
            print(
                f"step {len(records)}: {counted(size, 'rollout')} in "
                f"{counted(step.num_microbatches, 'micro-batch')}, "
                f"loss {loss:.6f}, grad norm {grad_norm:.4f}, next lr {learning_rate:.3e}",
                flush=True,
            )
    return records


if __name__ == "__main__":
    arguments = parse_arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu() else "nccl")
    train(arguments)
    dist.destroy_process_group()

"""What the plugin refuses at start-up, one sentence each.

A line leaves this list when a parity test proves the combination.
"""

from __future__ import annotations

import argparse

# Megatron's router takes a padding mask that it understands from here on.
AUX_LOSSES_SINCE = (0, 19)


def core_version() -> tuple[int, int]:
    """(major, minor) of the installed megatron-core."""
    from megatron.core.package_info import MAJOR, MINOR

    return MAJOR, MINOR


def refusals(args: argparse.Namespace) -> list[str]:
    """The reasons why these validated arguments cannot train with dynamic global batches."""

    def on(name: str) -> bool:
        return bool(getattr(args, name, False))

    pipeline = args.pipeline_model_parallel_size > 1
    graphs = str(getattr(args, "cuda_graph_impl", "none"))
    scopes = str(getattr(args, "cuda_graph_scope", ""))
    balancing = getattr(args, "moe_router_load_balancing_type", "none")
    balancing = set([balancing] if isinstance(balancing, str) else balancing)
    on_gpu_without_attention = args.transformer_impl == "local" and not on_cpu()
    refused = [
        ("full_iteration" in graphs + scopes,
         "full-iteration CUDA graphs: they replay stale buffers when the number of micro-batches "
         "changes"),
        (pipeline and (graphs == "transformer_engine" or on("external_cuda_graph")),
         "TransformerEngine CUDA graphs with pipeline parallelism: they are captured for one "
         "number of micro-batches"),
        (on("perform_rl_step"), "--perform-rl-step: it has its own data and batch sizes"),
        (on("sequence_packing_scheduler"),
         "--sequence-packing-scheduler: it also changes the number of micro-batches"),
        (on("hybrid_context_parallel"),
         "--hybrid-context-parallel: it also changes the number of micro-batches"),
        (on("rampup_batch_size"), "--rampup-batch-size: step sizes come from the rollouts"),
        (on("step_batch_size_schedule"),
         "--step-batch-size-schedule: step sizes come from the rollouts"),
        ((on("num_experts") or on("mtp_num_layers")) and core_version() < AUX_LOSSES_SINCE,
         "--num-experts and --mtp-num-layers before megatron-core 0.19: auxiliary losses are "
         "weighted per micro-batch from that version on"),
        (on("mtp_num_layers") and args.calculate_per_token_loss,
         "--mtp-num-layers with --calculate-per-token-loss: Megatron scales the MTP loss by a "
         "number of tokens that may be 0"),
        ((getattr(args, "mtp_num_layers", 0) or 0) > 1,
         "--mtp-num-layers above 1: the depths have different token counts but one loss scale"),
        (on("num_experts") and balancing & {"sinkhorn", "quantile_balancing"},
         "--moe-router-load-balancing-type sinkhorn or quantile_balancing: they route padding too"),
        (on("num_experts") and getattr(args, "moe_expert_capacity_factor", None) is not None,
         "--moe-expert-capacity-factor: which tokens are dropped would depend on the packing"),
        (on("num_experts") and args.moe_balance != "micro-batch" and balancing
         & {"aux_loss", "global_aux_loss"} != {"aux_loss"},
         f"--moe-balance {args.moe_balance}: it changes aux_loss only; give "
         "--moe-router-load-balancing-type aux_loss"),
        (args.moe_balance == "same-step" and on("overlap_param_gather"),
         "--moe-balance same-step with --overlap-param-gather: parameters are gathered by the "
         "first forward pass, which is another one here; take previous-step"),
        (on("overlap_moe_expert_parallel_comm"),
         "--overlap-moe-expert-parallel-comm: stock scripts drop the packed-sequence parameters "
         "under it"),
        (max(getattr(args, "gtp_weight_remat_size", 1) or 1,
             getattr(args, "expert_gtp_weight_remat_size", 1) or 1) > 1,
         "--tensor-parallel-num-weight-shards: its extra data-parallel axis is not planned for"),
        (on("use_megatron_fsdp") or on("use_custom_fsdp"),
         "--use-megatron-fsdp: gradient scaling is not proved under it"),
        (on("use_torch_fsdp2"), "--use-torch-fsdp2: gradient scaling is not proved under it"),
        (on("phase_transition_iterations"),
         "--phase-transition-iterations: it counts samples as iterations × batch size"),
        (getattr(args, "override_ckpt_iteration", None) is not None,
         "--override-ckpt-iteration: it counts samples as iterations × batch size"),
        (args.rollouts_per_step == "batch" and args.eval_iters
         and getattr(args, "eval_global_batch_size", None) is None,
         "--rollouts-per-step batch with --eval-iters: this Megatron takes the evaluation batch "
         "size from --global-batch-size; set --eval-iters 0"),
        (on("multi_latent_attention") and args.transformer_impl == "local"
         and args.tensor_model_parallel_size > 1,
         "--multi-latent-attention with --transformer-impl local and --tensor-model-parallel-size "
         "above 1: Megatron's local layers lose a part of the gradient of the keys' positions; use "
         "transformer_engine"),
        (on_gpu_without_attention,
         "--transformer-impl local on a GPU: its attention knows no packed sequences; use "
         "transformer_engine"),
    ]
    return [reason for applies, reason in refused if applies]


def on_cpu() -> bool:
    """Whether Megatron runs on the CPU runner, whose attention handles packed sequences."""
    import torch

    return torch.empty(0, device="cuda").device.type == "cpu" if torch.cuda.is_available() else True

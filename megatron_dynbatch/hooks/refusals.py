"""The entries of the table of traits that cannot work, so that nothing admits them, and pairs.

They are a file of their own for their number; `traits.TRAITS` has them, and one mechanism refuses.
"""

from __future__ import annotations

import argparse

from megatron_dynbatch.hooks.trait import (
    Pair,
    Test,
    Trait,
    above_one,
    balancing,
    both,
    equals,
    given,
    on,
    routes_by,
)

_PIPELINE = above_one("pipeline_model_parallel_size")


def on_cpu() -> bool:
    """Whether Megatron runs on the CPU runner, whose attention handles packed sequences."""
    import torch

    return torch.empty(0, device="cuda").device.type == "cpu" if torch.cuda.is_available() else True


def _full_iteration_graphs(args: argparse.Namespace) -> bool:
    names = ("cuda_graph_impl", "cuda_graph_scope")
    return any("full_iteration" in str(getattr(args, name, "")) for name in names)


def _graphs_of_stages(args: argparse.Namespace) -> bool:
    graphs = str(getattr(args, "cuda_graph_impl", "none")) == "transformer_engine"
    return _PIPELINE(args) and (graphs or on("external_cuda_graph")(args))


def _drops_tokens(args: argparse.Namespace) -> bool:
    return on("num_experts")(args) and given("moe_expert_capacity_factor")(args)


def _balances_nothing(args: argparse.Namespace) -> bool:
    kinds = {kind for kind, _ in balancing(args)}
    is_changed = getattr(args, "moe_balance", "micro-batch") != "micro-batch"
    return bool(kinds) and is_changed and kinds & {"aux_loss", "global_aux_loss"} != {"aux_loss"}


def _evaluates_without_size(args: argparse.Namespace) -> bool:
    evaluates = equals("rollouts_per_step", "batch")(args) and on("eval_iters")(args)
    return evaluates and not given("eval_global_batch_size")(args)


def _local_on_gpu(args: argparse.Namespace) -> bool:
    return equals("transformer_impl", "local")(args) and not on_cpu()


_LOCAL_TP = both(equals("transformer_impl", "local"), above_one("tensor_model_parallel_size"))

_ENTRIES: tuple[tuple[str, str, Test, str], ...] = (
    ("full-iteration-graphs", "full-iteration CUDA graphs", _full_iteration_graphs,
     "they replay stale buffers when the number of micro-batches changes"),
    ("graphs-of-stages", "TransformerEngine CUDA graphs with pipeline parallelism",
     _graphs_of_stages, "they are captured for one number of micro-batches"),
    ("rl-loop", "--perform-rl-step", on("perform_rl_step"),
     "it has its own data and batch sizes"),
    ("packing-scheduler", "--sequence-packing-scheduler", on("sequence_packing_scheduler"),
     "it also changes the number of micro-batches"),
    ("hybrid-context-parallel", "--hybrid-context-parallel", on("hybrid_context_parallel"),
     "it also changes the number of micro-batches"),
    ("batch-ramp", "--rampup-batch-size", on("rampup_batch_size"),
     "step sizes come from the rollouts"),
    ("batch-schedule", "--step-batch-size-schedule", on("step_batch_size_schedule"),
     "step sizes come from the rollouts"),
    ("mtp-depths", "--mtp-num-layers above 1", above_one("mtp_num_layers"),
     "the depths have different token counts but one loss scale"),
    ("routes-padding", "--moe-router-load-balancing-type sinkhorn or quantile_balancing",
     routes_by("sinkhorn", "quantile_balancing"), "they route padding too"),
    ("expert-capacity", "--moe-expert-capacity-factor", _drops_tokens,
     "which tokens are dropped would depend on the packing"),
    ("balance-of-nothing", "--moe-balance previous-step or same-step", _balances_nothing,
     "it changes aux_loss only; give --moe-router-load-balancing-type aux_loss"),
    ("overlapped-experts", "--overlap-moe-expert-parallel-comm",
     on("overlap_moe_expert_parallel_comm"),
     "stock scripts drop the packed-sequence parameters under it"),
    ("weight-shards", "--tensor-parallel-num-weight-shards",
     above_one("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
     "its extra data-parallel axis is not planned for"),
    ("megatron-fsdp", "--use-megatron-fsdp", on("use_megatron_fsdp", "use_custom_fsdp"),
     "gradient scaling is not proved under it"),
    ("torch-fsdp", "--use-torch-fsdp2", on("use_torch_fsdp2"),
     "gradient scaling is not proved under it"),
    ("phase-transitions", "--phase-transition-iterations", on("phase_transition_iterations"),
     "it counts samples as iterations × batch size"),
    ("checkpoint-iteration", "--override-ckpt-iteration", given("override_ckpt_iteration"),
     "it counts samples as iterations × batch size"),
    ("evaluation-size", "--rollouts-per-step batch with --eval-iters", _evaluates_without_size,
     "this Megatron takes the evaluation batch size from --global-batch-size; set --eval-iters 0"),
    ("local-latent-attention",
     "--multi-latent-attention with --transformer-impl local and --tensor-model-parallel-size "
     "above 1", both(on("multi_latent_attention"), _LOCAL_TP),
     "Megatron's local layers lose a part of the gradient of the keys' positions; use "
     "transformer_engine"),
    ("local-on-gpu", "--transformer-impl local on a GPU", _local_on_gpu,
     "its attention knows no packed sequences; use transformer_engine"),
)  # fmt: skip
REFUSALS = tuple(
    Trait("cannot work", name, flag, present, reason=reason, admissible=False)
    for name, flag, present, reason in _ENTRIES
)

# Transformer Engine's layers need a GPU, and Megatron's local ones are at fault there (above).
_ON_GPUS = "no parity test has both, because only GPUs run it; `verify --model` compares it there"
# Pairs of traits that train one by one.
PAIRS = (
    Pair(frozenset({"mtp", "per-token-loss"}),
         "Megatron scales the MTP loss by a number of tokens that may be 0; leave "
         "--calculate-per-token-loss out, --loss-reduction token is the same mean"),
    Pair(frozenset({"balance-same-step", "overlap-param-gather"}),
         "parameters are gathered by the first forward pass, which is another one here; take "
         "previous-step"),
    Pair(frozenset({"latent-attention", "tensor-parallel"}), _ON_GPUS, trains=True),
    Pair(frozenset({"latent-attention", "sequence-parallel"}), _ON_GPUS, trains=True),
)  # fmt: skip

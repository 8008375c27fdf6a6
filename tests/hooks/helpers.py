"""Megatron's arguments, and the options made of them, without a training."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_dynbatch.hooks.options import TrainingOptions


def arguments(**changed: Any) -> argparse.Namespace:
    """Of one process with the flag on; changed as asked."""
    values: dict[str, Any] = {
        "dynamic_global_batch": True, "rollouts_per_step": "batch", "max_tokens_per_gpu": 64,
        "loss_reduction": "rollout", "loss_constant": None, "leftover": "partial",
        "empty_rollouts": "count", "oversize": "error", "micro_batch_width": "variable",
        "step_splitter": "rollouts", "tokens_per_step": None, "micro_batch_order": "auto",
        "data_parallel_size": 1, "context_parallel_size": 1, "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": None, "expert_model_parallel_size": 1,
        "sequence_parallel": False, "global_batch_size": 8, "micro_batch_size": 1,
        "train_samples": None, "train_iters": None, "lr_decay_style": "constant",
        "lr_decay_samples": None, "lr_decay_iters": None, "rollout_path": "rollouts",
        "max_staleness": None, "stale_rollouts": "drop", "batch_timeout": 1800.0,
        "agreement_timeout": 300.0, "wait_for_path": False, "max_empty_batches": 100,
        "keep_batches": None, "rollout_ledger": None, "rollouts_moved": False,
        "on_batch_needed": None, "on_batch_opened": None, "load": None, "save": None,
        "eval_iters": 0, "use_distributed_optimizer": False, "overlap_param_gather": False,
        "num_layers": 1, "num_experts": None, "moe_router_topk": 2, "mtp_num_layers": None,
        "moe_balance": "micro-batch", "calculate_per_token_loss": False,
        "check_for_nan_in_loss_and_grad": False, "rerun_mode": "disabled",
        "admit_unproven": None, "step_report": None, "step_progress": "off",
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changed})


def training_options(**changed: Any) -> TrainingOptions:
    """Of `arguments`, changed as asked."""
    return TrainingOptions.from_args(arguments(**changed))

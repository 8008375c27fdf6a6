"""Megatron's arguments as the hooks read them, without a training."""

from __future__ import annotations

import argparse
from typing import Any


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
        "sequence_parallel": False, "step_progress": "off", "keep_batches": None, "save": None,
        "num_experts": None, "mtp_num_layers": None, "calculate_per_token_loss": False,
        "global_batch_size": 8, "micro_batch_size": 1,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changed})

"""Several trainings in one process, one after the other."""

from __future__ import annotations

import importlib
from typing import Any

# What Megatron keeps between calls of pretrain, as (module, name, value of a new process).
_KEPT: tuple[tuple[str, str, Any], ...] = (
    ("megatron.core.rerun_state_machine", "_GLOBAL_RERUN_STATE_MACHINE", None),
    ("megatron.core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER", None),
    ("megatron.core.tensor_parallel.random", "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False),
    ("megatron.core.transformer.moe.moe_logging", "_MOE_METRICS_TRACKER", None),
    ("megatron.training.checkpointing", "_CHECKPOINT_VERSION", None),
    ("megatron.training.checkpointing", "_LOADED_ITERATION", None),
    ("megatron.training.training", "_seqlen_stats_in_iteration", None),
    ("megatron.training.training", "_seqlen_stats_active", False),
)


def reset_megatron() -> None:
    """Forget the last training, so that this process can call pretrain again.

    Clears parallel state with its process groups, arguments, timers, tokenizer, micro-batch
    calculator, random states, rerun state machine and counters. The default process group stays;
    Megatron uses it again.
    """
    import torch.distributed as dist
    from megatron.core import mpu, parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    # Megatron forgets its groups; until they are destroyed, each keeps threads and sockets.
    for group in parallel_state._global_process_group_list or ():
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()
    destroy_global_vars()
    destroy_num_microbatches_calculator()
    for module_name, name, value in _KEPT:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            continue  # not in this version of Megatron
        if hasattr(module, name):
            setattr(module, name, value)

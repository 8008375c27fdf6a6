"""Means over whole samples, for losses that decide or weigh per sequence.

Under context parallelism a rank holds a part of each sample, so the ranks add up two numbers per
sample (the masked sum and its count) in one all-reduce. Log-probs themselves never travel.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.reduce import segment_sums


def sequence_means(
    values: Mapping[str, Tensor], microbatch: MicroBatch, cp_group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Mean over its sample's trained tokens, at every token: (1/n_i)·Σ_t m[i,t]·x[i,t].

    One all-reduce of [K+1, B] over context parallelism for K values, whatever the lengths; none
    without context parallelism or in a dummy micro-batch.

    Args:
        values: name → [T_local]; anything may stand at masked tokens. Detached here.
        microbatch: Says which tokens belong to which sample.
        cp_group: Context-parallel group; needed if C > 1.

    Returns:
        name → float64 [T_local], without gradient; 0 outside responses and where a sample has no
        trained token.

    Raises:
        ValueError: C > 1 without a group, or a group of another size.
    """
    _check_group(microbatch, cp_group)
    rows = [x.detach().reshape(-1).double() for x in values.values()]
    stacked = torch.stack([*rows, torch.ones_like(rows[0])])
    mask = microbatch.loss_mask.reshape(-1).double()
    _, sums = segment_sums(stacked, mask, microbatch.segments)
    if microbatch.cp_size > 1 and not microbatch.is_dummy:
        dist.all_reduce(sums, group=cp_group)
    means = sums[:-1] / sums[-1].clamp(min=1.0)
    # One more column, of zeros, for the positions that no response holds.
    owner = torch.from_numpy(microbatch.segments.samples).to(means.device, non_blocking=True)
    at_tokens = torch.nn.functional.pad(means, (0, 1))[:, owner]
    return dict(zip(values, at_tokens.unbind(), strict=True))


def _check_group(microbatch: MicroBatch, cp_group: dist.ProcessGroup | None) -> None:
    size = 1 if cp_group is None else dist.get_world_size(cp_group)
    if size != microbatch.cp_size:
        raise ValueError(
            f"a term per sequence needs the context-parallel group of size {microbatch.cp_size}, "
            f"got {'none' if cp_group is None else f'a group of size {size}'}: pass cp_group="
            "mpu.get_context_parallel_group()"
        )

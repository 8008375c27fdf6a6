"""Metrics of all ranks together, in one collective, with names that all ranks agree on.

Each rank sends a buffer of fixed size: a digest of its names and kinds, how many numbers it has,
and the numbers. All ranks see all digests, so where they differ, all ranks enter the second
exchange that finds out which name is missing where: an error on every rank, never a hang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.report.metric import NUM_PARTS, Metric, check_agreement, finished, meet

BUFFER = 256
"""Float64 numbers in the collective that every step makes; more metrics take a second one."""

_HEADER = 3


def reduce_over_ranks(
    metrics: Mapping[str, Metric], group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """The value of each metric over all ranks of a group; the same on each, to the last bit.

    Args:
        metrics: Name → metric, this rank's; the same names and kinds on every rank.
        group: For training, the data-parallel group with context parallelism; default: all ranks
            (or this process alone, where torch.distributed is not up).

    Returns:
        Name → value, in the order of this rank's names.

    Raises:
        ValueError: On every rank: a name that some ranks lack, naming it and them.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return {name: metric.value() for name, metric in metrics.items()}
    names = sorted(metrics)
    kinds: dict[str, str] = {name: metrics[name].kind for name in names}
    own = _flat([part for name in names for part in metrics[name].parts])
    device = _device(own, group)
    rows = _gathered(_buffer(kinds, own.to(device)), group)
    headers = rows[:, :_HEADER].tolist()
    if any(header != headers[0] for header in headers):
        _name_the_difference(kinds, group)
    if own.numel() > BUFFER - _HEADER:
        numbers = _gathered(own.to(device), group)
    else:
        numbers = rows[:, _HEADER : _HEADER + own.numel()]
    met, start = {}, 0
    for name in names:
        stop = start + NUM_PARTS[kinds[name]]
        met[name] = meet(kinds[name], numbers[:, start:stop])
        start = stop
    # One copy to the host for all of them.
    values = torch.cat([met[name] for name in names]).tolist() if names else []
    results, start = {}, 0
    for name in names:
        stop = start + NUM_PARTS[kinds[name]]
        results[name] = finished(kinds[name], values[start:stop])
        start = stop
    return {name: results[name] for name in metrics}


def _flat(parts: Sequence[Any]) -> Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    tensors = [p.detach().double().reshape(()) for p in parts if isinstance(p, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    return torch.stack(
        [torch.as_tensor(p, dtype=torch.float64).detach().reshape(()).to(device) for p in parts]
    )


def _device(own: Tensor, group: dist.ProcessGroup | None) -> torch.device:
    """Where the group's backend can send from."""
    if dist.get_backend(group) == "nccl" and own.device.type == "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return own.device


def _buffer(kinds: Mapping[str, str], own: Tensor) -> Tensor:
    digest = hashlib.sha256(repr(sorted(kinds.items())).encode()).digest()
    # Two integers that float64 holds exactly.
    header = [int.from_bytes(digest[:6]), int.from_bytes(digest[6:12]), own.numel()]
    buffer = own.new_zeros(BUFFER)
    buffer[:_HEADER] = torch.tensor(header, dtype=torch.float64)
    if own.numel() <= BUFFER - _HEADER:
        buffer[_HEADER : _HEADER + own.numel()] = own
    return buffer


def _gathered(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own.contiguous(), group=group)
    return torch.stack(rows)


def _name_the_difference(kinds: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Every rank gets here, because every rank saw every header."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dict(kinds), group=group)
    check_agreement(everyone, "rank")
    raise AssertionError("names agree although their digests differ")

"""gloo differs from NCCL in what it accepts and in when it reads a buffer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron_dynbatch.cpu.swap import swap


def install_collectives() -> None:
    """Make torch.distributed on gloo serve Megatron as NCCL does."""
    _groups_share_a_device()
    _exchange_takes_tensor_sizes()
    _gather_takes_unequal_parts()
    _reduce_scatter_takes_unequal_parts()
    _send_keeps_its_buffer()


def _groups_share_a_device() -> None:
    """Give all process groups of a process one gloo device.

    By default each has its own, whose thread wakes up a hundred times a second: with Megatron's
    thirty groups and several ranks to a core that is a good part of the machine.
    """
    own_devices: Any = distributed_c10d.ProcessGroupGloo

    class SharedDeviceGloo(own_devices):
        def __init__(
            self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any
        ) -> None:
            options = own_devices._Options()
            options._devices = [_device()]
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    @functools.cache  # made in the process that uses it, not in the server it was forked from
    def _device() -> Any:
        return own_devices.create_default_device()

    swap(distributed_c10d, "ProcessGroupGloo", SharedDeviceGloo)


def _exchange_takes_tensor_sizes() -> None:
    """Give all-to-all its split sizes as Python ints.

    Megatron's token dispatchers leave them tensors when there is no GPU copy to make; gloo refuses.
    """
    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def exchange_with_int_sizes(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return exchange(
            output, input, _ints(output_split_sizes), _ints(input_split_sizes), *args, **kwargs
        )

    swap(dist, "all_to_all_single", exchange_with_int_sizes)


def _gather_takes_unequal_parts() -> None:
    """Gather tensors of different lengths (experts under tensor parallelism), by broadcasts."""
    gather = dist.all_gather

    @functools.wraps(gather)
    def gather_any(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or _equal_shapes(tensor_list):
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        own = dist.get_rank(group)
        for rank, part in enumerate(tensor_list):
            if rank == own:
                part.copy_(tensor)
            dist.broadcast(part, group=group, group_src=rank)
        return None

    swap(dist, "all_gather", gather_any)


def _reduce_scatter_takes_unequal_parts() -> None:
    """Sum and scatter parts of different lengths, by all-reduce; gloo has no such collective."""
    reduce_scatter = dist.reduce_scatter

    @functools.wraps(reduce_scatter)
    def reduce_scatter_any(
        output: Tensor,
        input_list: list[Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or _equal_shapes(input_list):
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        own = dist.get_rank(group)
        for rank, part in enumerate(input_list):
            total = part.clone()
            dist.all_reduce(total, op=op, group=group)
            if rank == own:
                output.copy_(total)
        return None

    swap(dist, "reduce_scatter", reduce_scatter_any)


def _send_keeps_its_buffer() -> None:
    """Send an alias of the tensor, so that its memory lives until gloo has read it.

    Megatron empties a stage's output once the send is queued. On a GPU the stream orders the two;
    gloo's threads read later, and before 0.18 (NVIDIA/Megatron-LM waits for the send since then)
    the next stage received whatever the memory held by then.
    """
    send = dist.isend

    @functools.wraps(send)
    def send_alias(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return send(tensor.detach(), *args, **kwargs)

    # P2POp compares with the name in the defining module.
    swap(dist, "isend", send_alias)
    swap(distributed_c10d, "isend", send_alias)


def _equal_shapes(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _ints(sizes: Any) -> list[int] | None:
    if sizes is None:
        return None
    return [int(size) for size in sizes]

"""gloo differs from NCCL in what it accepts."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron_dynbatch.cpu.swap import swap


def install_collectives() -> None:
    """Give all-to-all its split sizes as Python ints.

    Megatron's token dispatchers hand over tensors when no GPU copy was needed; gloo refuses them.
    """
    exchange = torch.distributed.all_to_all_single

    @functools.wraps(exchange)
    def exchange_with_int_sizes(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return exchange(
            output, input, _ints(output_split_sizes), _ints(input_split_sizes), *args, **kwargs
        )

    swap(torch.distributed, "all_to_all_single", exchange_with_int_sizes)


def _ints(sizes: Any) -> list[int] | None:
    if sizes is None:
        return None
    return [int(size) for size in sizes]

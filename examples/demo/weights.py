"""The whole model's weights on every rank, whatever the parallel layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LAYER = re.compile(r"(.*layers)\.(\d+)\.(.*)")


def full_weights(model: Sequence[Any]) -> dict[str, Tensor]:
    """Gather parameters over tensor- and pipeline-parallel ranks; every rank must call it.

    Args:
        model: The model chunks of this rank, as Megatron's training loop has them.

    Returns:
        Name → whole parameter, layers numbered over the whole model.
    """
    from megatron.core import mpu

    own = {name: _over_tensor_parallel(parameter) for name, parameter in _named(model)}
    stages: list[dict[str, Tensor]] = [{}] * mpu.get_pipeline_model_parallel_world_size()
    dist.all_gather_object(stages, own, group=mpu.get_pipeline_model_parallel_group())
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def _named(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(list(model)):
        for name, parameter in chunk.named_parameters():
            match = _LAYER.fullmatch(name)
            if match:
                layers, number, rest = match.groups()
                layer = chunk.get_submodule(layers)[int(number)]
                name = f"{layers}.{layer.layer_number - 1}.{rest}"
            yield name, parameter


def _over_tensor_parallel(parameter: Any) -> Tensor:
    from megatron.core import mpu

    own = parameter.detach()
    size = mpu.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return own.clone()
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own.contiguous(), group=mpu.get_tensor_model_parallel_group())
    # A gated MLP keeps two matrices in one; each is split on its own.
    dim = parameter.partition_dim
    pieces = [part.chunk(parameter.partition_stride, dim) for part in parts]
    return torch.cat([torch.cat(column, dim) for column in zip(*pieces, strict=True)], dim)

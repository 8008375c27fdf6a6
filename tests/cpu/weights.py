"""Initial weights that depend on a parameter's global name alone.

Megatron's own initial weights differ between layouts (each pipeline stage draws from its own seed),
so trainings under different layouts start from these instead.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_LAYER = re.compile(r"^(?P<head>.*?layers\.)(?P<number>\d+)(?P<tail>\..*)$")
_EXPERT = re.compile(r"^(?P<head>.*local_experts\.)(?P<number>\d+)(?P<tail>\..*)$")


def global_parameters(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Name every parameter as a model without pipeline or expert parallelism would.

    Args:
        model: The model chunks of this rank, wrapped or not.

    Yields:
        Global name and parameter.
    """
    from megatron.core import mpu
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(list(model)):
        numbers = {
            name: module.layer_number - 1
            for name, module in chunk.named_modules()
            if hasattr(module, "layer_number") and re.search(r"layers\.\d+$", name)
        }
        for name, parameter in chunk.named_parameters():
            layer = _LAYER.match(name)
            if layer is not None:
                module = f"{layer['head']}{layer['number']}"
                name = f"{layer['head']}{numbers.get(module, layer['number'])}{layer['tail']}"
            expert = _EXPERT.match(name)
            if expert is not None:
                count = _experts_here(chunk)
                first = mpu.get_expert_model_parallel_rank() * count
                name = f"{expert['head']}{first + int(expert['number'])}{expert['tail']}"
            yield name, parameter


def overwrite_weights(model: Sequence[Any], seed: int) -> None:
    """Fill every parameter from `seed` and its global name, cut for this tensor-parallel rank.

    Vectors (norms, biases) are near their usual start so that training stays sane; matrices are
    normal with standard deviation 0.05.

    Args:
        model: The model chunks of this rank, wrapped or not.
        seed: Seed of all of them.
    """
    for name, parameter in global_parameters(model):
        random = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        size, rank = _tensor_parallel(name, parameter)
        shape = list(parameter.shape)
        if size > 1:
            shape[parameter.partition_dim] *= size
        full = torch.randn(shape, generator=random, dtype=torch.float64) * 0.05
        if "norm" in name and name.endswith("weight"):
            full += 1.0
        with torch.no_grad():
            parameter.copy_(cut(full, parameter, size, rank))


def cut(full: Tensor, parameter: Any, size: int, rank: int) -> Tensor:
    """This rank's part of a full parameter.

    Args:
        full: The parameter without tensor parallelism.
        parameter: The parameter as it is on this rank, with Megatron's partition attributes.
        size: Tensor-parallel size it is split over.
        rank: Rank in it.

    Returns:
        The part, of the parameter's shape.
    """
    if size == 1:
        return full
    # A gated MLP stacks two matrices in one; each is split on its own.
    pieces = full.chunk(parameter.partition_stride, dim=parameter.partition_dim)
    parts = [piece.chunk(size, dim=parameter.partition_dim)[rank] for piece in pieces]
    return torch.cat(parts, dim=parameter.partition_dim)


def _tensor_parallel(name: str, parameter: Any) -> tuple[int, int]:
    from megatron.core import mpu

    if not getattr(parameter, "tensor_model_parallel", False):
        return 1, 0
    if ".experts." in name:
        return mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    return mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()


def _experts_here(chunk: Any) -> int:
    return next(m.num_local_experts for m in chunk.modules() if hasattr(m, "num_local_experts"))

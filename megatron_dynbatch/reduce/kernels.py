"""The reductions on a GPU. Not there yet: every operator runs its torch implementation."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Status:
    """Whether the kernels run on a device, and why or why not."""

    active: bool
    reason: str


def status(device: torch.device) -> Status:
    """Which path is active on a device."""
    return Status(False, "no kernels yet")


def supports(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a kernel can run this operator on these arguments."""
    return False


def _missing(*arguments: Any) -> Tensor:
    raise NotImplementedError("no kernel of this operator")


weighted_sums = weighted_sums_backward = token_weights = _missing
segment_sums = segment_sums_backward = exact_sums = exact_segment_sums = _missing

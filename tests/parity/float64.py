"""Megatron's router without its own rounding.

It computes scores in float32 whatever the model; where logits differ in their sixteenth digit, as
they do between layouts, such a score is now and then off by one rounding, 6e-8. To see whether
layouts agree to 1e-9 that rounding has to go; nothing else of Megatron is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _WideTorch:
    """The torch module with a softmax that stays in the dtype of a float64 input."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.softmax(x, dim, dtype=None if x.dtype == torch.float64 else dtype)


def keep_float64() -> None:
    """Let the router of this process compute in float64 where its logits are; for good."""
    from megatron.core.transformer.moe import moe_utils

    to_float = Tensor.float
    Tensor.float = lambda self: self if self.dtype == torch.float64 else to_float(self)  # type: ignore[method-assign]
    moe_utils.torch = _WideTorch()

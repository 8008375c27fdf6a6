"""Checks of arguments, made before anything is launched."""

from typing import Literal

import torch
from torch import Tensor

Accumulate = Literal["float64", "exact"]


def check_values(x: Tensor, w: Tensor) -> None:
    """Raises ValueError unless x is contiguous [K, T] and w constant float64 [T] beside it."""
    if w.dim() != 1 or w.dtype != torch.float64:
        raise ValueError(f"token weights must be float64 [T], got {w.dtype} {list(w.shape)}")
    if w.requires_grad:
        raise ValueError("token weights are constants of the step; detach them")
    if x.dim() != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"values of shape {list(x.shape)} do not match token weights of shape {list(w.shape)}:"
            " expected [K, T] and [T]"
        )
    if not x.dtype.is_floating_point:
        raise ValueError(f"values must be floating point, got {x.dtype} {list(x.shape)}")
    if x.device != w.device:
        raise ValueError(f"values are on {x.device}, token weights on {w.device}")
    if not x.is_contiguous() or not w.is_contiguous():
        raise ValueError(
            f"values {list(x.shape)} with strides {list(x.stride())} and token weights "
            f"{list(w.shape)} must be contiguous; call .contiguous()"
        )


def check_accumulate(accumulate: str) -> None:
    """Raises ValueError for an unknown way to accumulate."""
    if accumulate not in ("float64", "exact"):
        raise ValueError(f"accumulate is 'float64' or 'exact', got {accumulate!r}")

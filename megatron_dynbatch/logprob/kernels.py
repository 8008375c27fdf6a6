"""The operators on a GPU: one launch each, one block for a row of logits."""

import torch
from torch import Tensor

from megatron_dynbatch.reduce import kernels, loader

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def supports(first: Tensor) -> bool:
    """Whether the kernels can run on this operator's first argument and its device."""
    return (
        first.dtype in DTYPES
        and first.is_contiguous()
        and first.shape[-1] < 2**31
        and kernels.status(first.device).active
    )


def empty_beside(logits: Tensor) -> Tensor:
    """Memory for a gradient, as far from an address of 16 bytes as the logits: read in vectors."""
    start = 0 if not logits.is_contiguous() else logits.storage_offset() % 16
    return logits.new_empty(logits.numel() + start)[start:].view(logits.shape)


def statistics(
    logits: Tensor, targets: Tensor, keep: Tensor | None, columns: int, scale: float, mean: bool
) -> Tensor:
    """See `reference.statistics`; Σ exp(y)·y is always there."""
    num_rows, width = logits.shape
    result = logits.new_empty((num_rows, 4), dtype=torch.float32)
    if num_rows:
        kernels.launch(
            f"logprob_statistics_{DTYPES[logits.dtype]}",
            (num_rows, 1),
            [logits, targets.contiguous(), _bytes(keep), width, columns, float(scale), result],
        )
    return result


def combine(parts: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.combine`."""
    num_parts, num_rows, _ = parts.shape
    logp, entropy = parts.new_empty(num_rows), parts.new_empty(num_rows)
    saved = parts.new_empty(num_rows, 3)
    if num_rows:
        kernels.launch(
            "logprob_combine",
            (-(-num_rows // loader.BLOCK), 1),
            [parts, _bytes(keep), num_parts, num_rows, float(scale), logp, entropy, saved],
        )
    return logp, entropy, saved


def backward(
    logits: Tensor,
    targets: Tensor,
    keep: Tensor | None,
    saved: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    columns: int,
    scale: float,
    grad: Tensor,
) -> None:
    """See `reference.backward`."""
    num_rows, width = logits.shape
    if not num_rows:
        return
    gradients = [None if g is None else g.contiguous() for g in (grad_logp, grad_entropy)]
    kernels.launch(
        f"logprob_backward_{DTYPES[logits.dtype]}",
        (num_rows, 1),
        [logits, targets.contiguous(), _bytes(keep), saved, *gradients, width, columns]
        + [float(scale), grad],
    )


def _bytes(keep: Tensor | None) -> Tensor | None:
    return None if keep is None else keep.contiguous().view(torch.uint8)

"""The operators on a GPU: which kernel, which grid, which scratch memory.

Every function has the signature of its operator and makes exactly one launch. Grids depend on
shapes alone, never on values, so a captured CUDA graph is valid for every table of the same size.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_dynbatch.reduce import loader
from megatron_dynbatch.reduce.loader import Argument
from megatron_dynbatch.reduce.policy_reference import METRICS

TILE = 4 * loader.BLOCK  # tokens that one block sums: kTile of csrc/common.cuh

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}


@dataclass(frozen=True)
class Status:
    """Whether the kernels run on a device, and why or why not."""

    active: bool
    reason: str


@cache
def status(device: torch.device) -> Status:
    """Which path is active on a device; loads (and if need be compiles) the kernels."""
    if device.type != "cuda":
        return Status(False, f"torch implementation: no kernels for {device.type} tensors")
    if os.environ.get("MEGATRON_DYNBATCH_KERNELS") == "0":
        return Status(False, "torch implementation: MEGATRON_DYNBATCH_KERNELS=0")
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        return Status(True, f"CUDA kernels: {loader.load(index).origin}")
    except (ImportError, RuntimeError) as error:
        return Status(False, f"torch implementation: {type(error).__name__}: {error}")


def supports(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a kernel can run this operator on these arguments."""
    first = arguments[0]
    if name in ("weighted_sums_backward", "segment_sums_backward"):
        known = arguments[-1] in DTYPES
    elif name == "policy_loss":
        tensors = [a for a in (*arguments[:3], *arguments[4:7]) if a is not None]
        known = all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    else:
        known = name == "token_weights" or first.dtype in DTYPES
    return known and first.shape[-1] < 2**31 and status(first.device).active


def launch(name: str, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
    """Launches one kernel on torch's current stream; tests put the host emulator here."""
    device = next(a for a in arguments if isinstance(a, Tensor)).device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        kernel = loader.load(device.index).kernel(name)
        loader.make_context_current(device.index)
        kernel.launch(grid, arguments, stream)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _arrival_counters(device: torch.device, count: int) -> Tensor:
    """Zeros that a launch leaves zero again, one set per stream so that launches do not share."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters or _counters[key].numel() < count:
        _counters[key] = torch.zeros(max(count, 64), dtype=torch.int32, device=device)
    return _counters[key]


def _tile_grid(num_tokens: int, num_pieces: int, rows: int) -> tuple[int, int]:
    """Blocks for Σ ⌈length / tile⌉ over pieces, which is at most this, whatever the lengths."""
    return num_tokens // TILE + max(num_pieces, 1), rows


def _reduce(
    x: Tensor, w: Tensor, pieces: Tensor | None, num_samples: int, exact: bool
) -> tuple[Tensor, Tensor]:
    """Totals [K] and per-sample sums [K, num_samples]; limbs in a last dimension if exact."""
    num_values, num_tokens = x.shape
    width = 4 if exact else 1 if num_values == 1 else 8
    words, dtype = ((3,), torch.int64) if exact else ((), torch.float64)
    total = w.new_empty((num_values, *words), dtype=dtype)
    per_sample = w.new_empty((num_values, num_samples, *words), dtype=dtype)
    if num_values == 0:
        return total, per_sample
    count = 1 if pieces is None else pieces.shape[1]
    grid = _tile_grid(num_tokens, count, -(-num_values // width))
    tiles = w.new_empty((grid[1], grid[0], width, *words), dtype=dtype)
    kind = DTYPES[x.dtype]
    name = f"exact_sums_{kind}" if exact else f"segment_sums_{kind}_{width}"
    arrived = _arrival_counters(x.device, grid[1])
    launch(
        name,
        grid,
        [x, w, pieces, count, num_samples, num_tokens, num_values, tiles, arrived, total]
        + [per_sample if num_samples else None],
    )
    return total, per_sample


def weighted_sums(x: Tensor, w: Tensor) -> Tensor:
    """See `reference.weighted_sums`."""
    return _reduce(x, w, None, 0, exact=False)[0]


def exact_sums(x: Tensor, w: Tensor) -> Tensor:
    """Limbs of Σ_t w[t]·x[k, t], int64 [K, 3]."""
    return _reduce(x, w, None, 0, exact=True)[0]


def segment_sums(
    x: Tensor, w: Tensor, pieces: Tensor, samples: Tensor | None, num_samples: int
) -> tuple[Tensor, Tensor]:
    """See `reference.segment_sums`."""
    return _reduce(x, w, pieces, num_samples, exact=False)


def exact_segment_sums(
    x: Tensor, w: Tensor, pieces: Tensor, samples: Tensor | None, num_samples: int
) -> tuple[Tensor, Tensor]:
    """Limbs of totals [K, 3] and of per-sample sums [K, B, 3]."""
    return _reduce(x, w, pieces, num_samples, exact=True)


def _spread(
    grad_total: Tensor,
    grad_samples: Tensor | None,
    w: Tensor,
    pieces: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    num_values, num_tokens = grad_total.shape[0], w.shape[0]
    dx = w.new_empty((num_values, num_tokens), dtype=dtype)
    if dx.numel() == 0:
        return dx
    num_samples = 0 if grad_samples is None else grad_samples.shape[1]
    arguments: list[Argument] = [grad_total.contiguous(), grad_samples if num_samples else None, w]
    arguments += [pieces, 0 if pieces is None else pieces.shape[1], num_samples]
    launch(
        f"segment_sums_backward_{DTYPES[dtype]}",
        (-(-num_tokens // TILE), 1),
        [*arguments, num_tokens, num_values, dx],
    )
    return dx


def weighted_sums_backward(grad: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
    """See `reference.weighted_sums_backward`."""
    return _spread(grad, None, w, None, dtype)


def segment_sums_backward(
    grad_total: Tensor,
    grad_samples: Tensor,
    w: Tensor,
    pieces: Tensor,
    samples: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `reference.segment_sums_backward`."""
    return _spread(grad_total, grad_samples, w, pieces, dtype)


def token_weights(
    masks: Tensor,
    denoms: Tensor,
    pieces: Tensor,
    sources: Tensor | None,
    samples: Tensor | None,
    num_tokens: int,
) -> Tensor:
    """See `reference.token_weights`."""
    w = denoms.new_empty(num_tokens)
    if num_tokens == 0:
        return w
    if masks.dtype == torch.bool:
        masks = masks.view(torch.uint8)
    elif masks.dtype not in (torch.float32, torch.uint8):
        masks = masks.to(torch.float32)
    kind = "uint8" if masks.dtype == torch.uint8 else "float32"
    launch(
        f"token_weights_{kind}",
        (-(-num_tokens // TILE), 1),
        [masks, denoms, pieces, pieces.shape[1], denoms.shape[0], num_tokens, w],
    )
    return w


def policy_loss(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    w: Tensor,
    ref: Tensor | None,
    rollout: Tensor | None,
    entropy: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.policy_loss`; all per-token tensors but w are float32."""
    *scalars, pieces, _, num_samples = rest
    num_tokens = logp.shape[0]
    sums, per_sample = w.new_empty(len(METRICS)), w.new_empty(len(METRICS), num_samples)
    # With a table the kernel visits its pieces alone.
    slope = torch.empty_like(logp) if pieces is None else torch.zeros_like(logp)
    count = 1 if pieces is None else pieces.shape[1]
    grid = _tile_grid(num_tokens, count, 1)
    tiles = w.new_empty(grid[0], len(METRICS))
    tensors: list[Argument] = [logp, old, advantages, w, ref, rollout, entropy]
    launch(
        "policy_loss",
        grid,
        [*tensors, *scalars, pieces, count, num_samples, num_tokens, slope, tiles]
        + [_arrival_counters(w.device, 1), sums, per_sample if num_samples else None],
    )
    return sums, slope, per_sample

"""The definition of log-prob and entropy over a vocabulary in parts, in torch, in chunks of rows.

With scale = 1 / temperature and M the largest logit of a row over the whole vocabulary:

    y_v = (x_v − M)·scale        total = Σ_v exp y_v        p_v = exp(y_v) / total
    logp = y_target − log total                     ∂logp/∂x_v = scale·([v = target] − p_v)
    entropy = log total − Σ_v p_v·y_v               ∂entropy/∂x_v = −scale·p_v·(log p_v + entropy)

M is subtracted before anything is multiplied or exponentiated, so logits of ±1e4 lose nothing. Each
part of the vocabulary gives four numbers a row: its own M, total and Σ exp(y)·y, and the target's
logit (−inf where it is elsewhere). Rows are handled in chunks that stay in the cache: nothing as
large as the logits is made beside them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ROWS_PER_CHUNK = 512  # at most

# exp is 0 below it in float64 too; 0 times it is 0, where 0·(−inf) would be NaN.
_FLOOR = -1e4

Rows = slice | Tensor


def statistics(
    logits: Tensor, targets: Tensor, keep: Tensor | None, columns: int, scale: float, mean: bool
) -> Tensor:
    """What one part of the vocabulary knows of each row.

    Args:
        logits: [T, V/tp].
        targets: int64 [T], relative to this part: out of range where another one holds it.
        keep: bool [T]; the others are not read (on the CPU) and give 0.
        columns: How many columns count; those after them are padding and are not read.
        scale: 1 / temperature.
        mean: Whether Σ exp(y)·y is wanted; 0 otherwise.

    Returns:
        [T, 4] in float32 (float64 for float64): M, Σ exp y, Σ exp(y)·y, logit of the target.
    """
    result = logits.new_zeros((logits.shape[0], 4), dtype=compute_dtype(logits))
    if columns == 0:
        result[:, 0], result[:, 3] = torch.finfo(result.dtype).min, -torch.inf
        return result
    for rows in row_chunks(logits, keep):
        result[rows] = _chunk_statistics(logits, rows, targets, columns, scale, mean)
    return result


def _chunk_statistics(
    logits: Tensor, rows: Rows, targets: Tensor, columns: int, scale: float, mean: bool
) -> Tensor:
    # A function of its own: what a chunk needs is free again before the next one begins.
    x, owned = _values(logits, rows, columns)
    # Finite where a part is forbidden (−inf) as a whole.
    largest = x.amax(1).clamp_(min=torch.finfo(x.dtype).min)
    index, here = _local_target(targets[rows], columns)
    at_target = torch.where(here, x.gather(1, index[:, None])[:, 0], -torch.inf)
    y = torch.sub(x, largest[:, None], out=x if owned else None)
    if scale != 1.0:
        y.mul_(scale)
    weight = y.exp() if mean else y.exp_()
    total = weight.sum(1)
    product = y.clamp_(min=_FLOOR).mul_(weight).sum(1) if mean else torch.zeros_like(total)
    return torch.stack([largest, total, product, at_target], 1)


def combine(parts: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Results of each row from what all parts of the vocabulary know, in float64 inside.

    Args:
        parts: [tp, T, 4], see `statistics`.
        keep: bool [T]; 0 elsewhere.
        scale: 1 / temperature.

    Returns:
        logp [T], entropy [T], and for the backward pass M, total and entropy, [T, 3]. A target that
        no part holds has logp −inf.
    """
    own_max, own_total, own_mean, at_target = parts.double().unbind(-1)
    largest = own_max.amax(0)
    shift = ((own_max - largest) * scale).clamp(min=_FLOOR)
    rescale = shift.exp()
    total = (own_total * rescale).sum(0)
    mean = ((own_mean + own_total * shift) * rescale).sum(0) / total
    log_total = total.log()
    logp = (at_target.amax(0) - largest) * scale - log_total
    entropy = log_total - mean
    results = torch.stack([logp, entropy, largest, total])
    if keep is not None:
        results = torch.where(keep, results, 0.0)
    logp, entropy, largest, total = (x.clone() for x in results.to(parts.dtype))
    return logp, entropy, torch.stack([largest, total, entropy], 1)


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
    """Writes the gradient in the logits of every row, 0 in the rows that are not kept.

    Args:
        logits: As in `statistics`; so are targets, keep, columns and scale.
        saved: [T, 3] of `combine`.
        grad_logp: [T] or None.
        grad_entropy: [T] or None.
        grad: [T, V/tp] to write to; may be `logits` itself.
    """
    grad[:, columns:] = 0
    if keep is not None and keep.device.type == "cpu":
        for rows in row_chunks(logits, ~keep):
            grad[rows, :columns] = 0
    if columns:
        slopes = grad_logp, grad_entropy
        for rows in row_chunks(logits, keep):
            _chunk_gradient(logits, rows, targets, keep, saved, slopes, columns, scale, grad)


def _chunk_gradient(
    logits: Tensor,
    rows: Rows,
    targets: Tensor,
    keep: Tensor | None,
    saved: Tensor,
    slopes: tuple[Tensor | None, Tensor | None],
    columns: int,
    scale: float,
    grad: Tensor,
) -> None:
    x, owned = _values(logits, rows, columns)
    largest, total, entropy = saved[rows].unbind(1)
    of_logp = torch.zeros_like(total) if slopes[0] is None else slopes[0][rows].to(total.dtype)
    y = torch.sub(x, largest[:, None], out=x if owned else grad[rows, :columns])
    if scale != 1.0:
        y.mul_(scale)
    factor = -scale / total
    if slopes[1] is None:
        y.exp_().mul_((factor * of_logp)[:, None])
    else:
        of_entropy = slopes[1][rows].to(total.dtype)
        constant = factor * (of_logp + of_entropy * (entropy - total.log()))
        weight = y.exp()
        y.clamp_(min=_FLOOR).mul_((factor * of_entropy)[:, None]).add_(constant[:, None])
        y.mul_(weight)
    index, here = _local_target(targets[rows], columns)
    y.scatter_add_(1, index[:, None], torch.where(here, of_logp * scale, 0.0)[:, None])
    if keep is not None and keep.device.type != "cpu":
        y.masked_fill_(~keep[rows, None], 0.0)
    if owned:
        grad[rows, :columns] = y if isinstance(rows, slice) else y.to(grad.dtype)


def compute_dtype(logits: Tensor) -> torch.dtype:
    """Element type of results: float32, or float64 for float64 logits."""
    return torch.promote_types(logits.dtype, torch.float32)


def rows_per_chunk(width: int, device: torch.device) -> int:
    """Rows of a chunk: 1 MB of float32 on a CPU (its cache), 128 MB on a GPU (few launches)."""
    values = 2**18 if device.type == "cpu" else 2**25
    return max(1, min(ROWS_PER_CHUNK, values // max(width, 1)))


def row_chunks(logits: Tensor, keep: Tensor | None) -> Iterator[Rows]:
    """Rows to handle together: a slice, or indices where kept rows are not consecutive.

    On other devices than the CPU all rows are handled: to ask which are kept would wait for it.
    """
    num_rows = logits.shape[0]
    size = rows_per_chunk(logits.shape[1], logits.device)
    if keep is None or keep.device.type != "cpu":
        for start in range(0, num_rows, size):
            yield slice(start, min(start + size, num_rows))
        return
    for kept in keep.nonzero()[:, 0].split(size):
        if not kept.numel():  # an empty tensor splits into one empty part
            return
        first, last = int(kept[0]), int(kept[-1])
        yield slice(first, last + 1) if last - first + 1 == kept.numel() else kept


def _values(logits: Tensor, rows: Rows, columns: int) -> tuple[Tensor, bool]:
    """The logits of a chunk in the type of the results, and whether they are a copy of ours."""
    part = logits[rows, :columns]
    values = part.to(compute_dtype(logits))
    return values, values is not part or not isinstance(rows, slice)


def _local_target(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """An index that is always valid, and whether it is the target."""
    here = (targets >= 0) & (targets < columns)
    return torch.where(here, targets, 0), here

"""Whitening of per-token values that ranks hold in parts, by one affine map for all of them."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.rollouts.advantages import Moments


def whiten_over_ranks(
    x: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None, *, epsilon: float = 1e-8
) -> Tensor:
    """(x − mean) / (std + ε) with mean and population std over the tokens of all ranks.

    For a whole step at once, before it is cut into micro-batches: statistics of one micro-batch
    would make the result depend on the packing. One all-gather of 3 numbers; the ranks' moments
    are merged in rank order, so the map is the same on each to the last bit.

    Args:
        x: Values of this rank's tokens, any shape.
        mask: Of the same shape; where it is 0 a token does not count and gives 0.
        group: Data-parallel group *with* context parallelism: its ranks hold disjoint tokens.
        epsilon: ε > 0 keeps constant values at 0.

    Returns:
        Float64 of the shape of x, without gradient.

    Raises:
        ValueError: Shapes differ.
    """
    if x.shape != mask.shape:
        raise ValueError(f"values have shape {list(x.shape)}, their mask {list(mask.shape)}")
    keep = mask != 0
    own = Moments.of(x.detach()[keep].double().cpu().numpy())
    parts = [own]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        sent = torch.tensor(
            [own.count, own.mean, own.deviations], dtype=torch.float64, device=x.device
        )
        gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, sent, group=group)
        parts = [Moments(*part.tolist()) for part in gathered]
    total = Moments.combine(parts)
    centred = torch.where(keep, x.detach(), 0.0).double() - total.mean
    return torch.where(keep, centred / (total.std + epsilon), 0.0)

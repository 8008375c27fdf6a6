"""The clipped value loss of actor-critic methods."""

import torch
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch


def value(
    output: Tensor, microbatch: MicroBatch, *, clip: float | None = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared error of the value head against the column `returns`, clipped around `values`.

        x = ½·max((V − R)², (V_old + clip(V − V_old, −ε, ε) − R)²)

    arXiv:2005.12729, section 3, "value function clipping". Without `clip`: x = ½·(V − R)².

    Args:
        output: One value per local token, any shape of T_local values.
        microbatch: Gives the columns `returns` and, with `clip`, `values`.
        clip: ε > 0, or None.

    Returns:
        l = Σ w·x, 0-d float64, and local weighted sums (detached): "value_loss",
        "value_clip_fraction", "value", "return".

    Raises:
        ValueError: A clip that is not positive, an output of another size, a missing column.
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"clip must be positive or None, got {clip}")
    if output.numel() != microbatch.num_tokens:
        raise ValueError(
            f"the value head returned shape {list(output.shape)}, expected one value for each of "
            f"{microbatch.num_tokens} local tokens"
        )
    # Selected before any arithmetic: 0·NaN in a backward pass would be NaN again.
    keep = microbatch.token_weights != 0
    values = torch.where(keep, output.reshape(-1), 0.0)
    returns = torch.where(keep, microbatch.column("returns"), 0.0)
    error = (values - returns).square()
    clipped = torch.zeros_like(error)
    if clip is not None:
        old = torch.where(keep, microbatch.column("values"), 0.0)
        bounded = (old + (values - old).clamp(-clip, clip) - returns).square()
        clipped = (bounded > error).to(error.dtype).detach()
        error = torch.maximum(error, bounded)
    sums = microbatch.sums(
        {
            "value_loss": 0.5 * error,
            "value_clip_fraction": clipped,
            "value": values.detach(),
            "return": returns,
        }
    )
    return sums["value_loss"], {name: entry.detach() for name, entry in sums.items()}

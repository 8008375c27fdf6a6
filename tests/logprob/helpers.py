"""Right values of log-prob, entropy and their gradients, by torch's log-softmax in float64."""

import torch
from torch import Tensor

INF = float("inf")


def reference(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """logp [T] and entropy [T], float64."""
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    entropy = -(log_p.exp() * torch.where(log_p == -INF, 0.0, log_p)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def reference_gradient(
    logits: Tensor,
    targets: Tensor,
    slopes: tuple[Tensor, Tensor],
    temperature: float = 1.0,
) -> Tensor:
    """Gradient of Σ slopes[0]·logp + slopes[1]·entropy in the logits, float64, in closed form."""
    log_p = torch.log_softmax(logits.double() / temperature, -1)
    p, finite = log_p.exp(), torch.where(log_p == -INF, 0.0, log_p)
    entropy = -(p * finite).sum(-1, keepdim=True)
    of_logp, of_entropy = (slope.double()[:, None] for slope in slopes)
    hit = torch.nn.functional.one_hot(targets, logits.shape[-1])
    return (of_logp * (hit - p) - of_entropy * p * (finite + entropy)) / temperature


def hard_rows(width: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows at the limits of floats, float32 [width]: name → logits; target 0 is always possible."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(width, generator=generator) * 3
    forbidden = torch.rand(width, generator=generator) < 0.9
    forbidden[0] = False
    one_hot = torch.full((width,), -INF)
    one_hot[0] = 2.0
    return {
        "far up": x + 1e4,
        "far down": x - 1e4,
        "both ends": torch.where(torch.arange(width) % 2 == 0, 1e4, -1e4),
        "top-k": torch.where(forbidden, -INF, x),
        "top-k far down": torch.where(forbidden, -INF, x - 1e4),
        "one-hot": one_hot,
        "one peak": torch.where(torch.arange(width) == 0, 1e4, x),
        "uniform": torch.full((width,), 7.0),
    }

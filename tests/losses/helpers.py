"""One optimizer step through Megatron's own loss arithmetic, all ranks in one process."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_dynbatch.layout import MicroBatch, build_micro_batch
from megatron_dynbatch.losses import megatron_loss
from megatron_dynbatch.plan import Plan
from megatron_dynbatch.rollouts import Sample

schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")

LocalSum = Callable[[torch.Tensor, MicroBatch], torch.Tensor]


def sample_with(values: Sequence[float], mask: Sequence[int] | None = None, **ids: int) -> Sample:
    """One prompt token, then a response whose `log_probs` carry the per-token values."""
    mask = [1] * len(values) if mask is None else mask
    return Sample(np.arange(len(values) + 1), loss_mask=mask, log_probs=values, **ids)


def mean_of_values(theta: torch.Tensor, mb: MicroBatch) -> torch.Tensor:
    """Σ w·θ·x, x being the column `log_probs`: at θ = 1 loss and gradient are the same number.

    NaN at a masked token reaches the loss; θ's own product rule (0·NaN) is kept out of it.
    """
    x = mb.column("log_probs").double()
    return mb.mean(x + (theta - 1) * x.nan_to_num(0, 0, 0))


def run_step(
    plan: Plan, samples: Sequence[Sample], per_token: bool, local_sum: LocalSum = mean_of_values
) -> tuple[float, float]:
    """Loss that Megatron reports and gradient of θ that its optimizer sees.

    `forward_step_calc_loss` is Megatron's; the sums over ranks (DDP's mean or sum, the division by
    Σ num_tokens in `finalize_model_grads`, the report in `train_step`) are done here.
    """
    step, layout = plan.steps[0], plan.layout
    config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None)
    gradient, num_tokens, report = 0.0, 0, torch.zeros(2, dtype=torch.float64)
    for dp_rank in range(layout.dp):
        for cp_rank in range(layout.cp):
            theta = torch.ones((), dtype=torch.float64, requires_grad=True)
            for k in range(step.num_microbatches):
                mb = build_micro_batch(
                    plan, 0, dp_rank, k, dict(enumerate(samples)), cp_rank=cp_rank
                )
                store: list[torch.Tensor] = []

                def loss_func(output, mb=mb):
                    value = local_sum(output, mb)
                    loss, n, count = megatron_loss(
                        value, step, layout, calculate_per_token_loss=per_token
                    )
                    assert n.dtype == torch.int32 and n.dim() == 0
                    return loss, n, torch.stack([value.detach(), value.new_tensor(count)])

                loss, n = schedules.forward_step_calc_loss(
                    None, theta, loss_func, config, None, False, step.num_microbatches, store,
                    cp_group_size=layout.cp, is_last_stage=True,
                )  # fmt: skip
                loss.backward()
                num_tokens += int(n)
                report += store[0]
            gradient += theta.grad.item()
    if not per_token:
        gradient /= layout.dp * layout.cp
    elif num_tokens > 0:
        gradient /= num_tokens
    return (report[0] / report[1]).item(), gradient

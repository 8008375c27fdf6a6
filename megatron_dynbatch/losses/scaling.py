"""What a loss function hands to Megatron, so that the step's gradient is that of Σ w·x / B.

`forward_step_calc_loss` divides a 3-tuple's loss by max(n, 1) and by M, and the data-parallel
reduction divides gradients by W = D·C; with per-token loss it divides by nothing and the gradient
is summed over W and divided by the total of n if that is positive. The factors here undo exactly
that, whatever the packing and the layout.
"""

import torch
from torch import Tensor

from megatron_dynbatch.plan.layout import ParallelLayout
from megatron_dynbatch.plan.types import StepPlan


def megatron_loss(
    local_sum: Tensor,
    step: StepPlan,
    layout: ParallelLayout,
    *,
    calculate_per_token_loss: bool,
) -> tuple[Tensor, Tensor, float]:
    """Scales a micro-batch's local sum for Megatron.

    Args:
        local_sum: l = Σ w·x over this rank's tokens of one micro-batch, one element.
        step: The step it belongs to (gives M and B).
        layout: Gives W = dp·cp.
        calculate_per_token_loss: As in Megatron's config.

    Returns:
        The loss, 0-d, and the number of tokens, 0-d int32, to return to Megatron; and the count
        that goes beside each local sum in its report, so that counts add up to B.
    """
    world = layout.dp * layout.cp
    num_microbatches = step.num_microbatches
    denominator = step.loss_denominator
    report_count = denominator / (num_microbatches * world)
    scalar = local_sum.reshape(())
    if calculate_per_token_loss:
        return scalar / denominator, _count(0, scalar), report_count
    return scalar * (num_microbatches * world / denominator), _count(1, scalar), report_count


def _count(number: int, like: Tensor) -> Tensor:
    return torch.tensor(number, dtype=torch.int32, device=like.device)

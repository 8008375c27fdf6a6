"""What is handed to Megatron for l = Σ w·x, so that a step's gradient is that of Σ l / B.

Megatron scales a returned loss by the number of micro-batches and DDP averages gradients over
W = dp·cp ranks (or, with `calculate_per_token_loss`, sums them and divides by Σ num_tokens). The
factors here undo exactly that; no context-parallel size and no packing is left in the result.
"""

import functools

import torch
from torch import Tensor

from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.types import StepPlan


def megatron_loss(
    l: Tensor,  # noqa: E741 - the symbol of the arithmetic
    step: StepPlan,
    layout: ParallelLayout,
    *,
    calculate_per_token_loss: bool,
) -> tuple[Tensor, Tensor, float]:
    """Scales a micro-batch's local sum for Megatron's three-tuple loss contract.

    Args:
        l: 0-d (or one-element) Σ w·x over the tokens local to this rank in this micro-batch.
        step: Gives M and B.
        layout: Gives W = dp·cp.
        calculate_per_token_loss: Megatron's flag of the same name.

    Returns:
        loss: 0-d, l·M·W/B, or l/B with per-token loss.
        num_tokens: 0-d int32, 1, or 0 with per-token loss: Megatron then leaves gradients alone.
            The same tensor in every call: do not write to it.
        report_count: B/(M·W). A report `[l, report_count]` per key, summed by Megatron over
            micro-batches and DP×CP ranks, divides Σ l by B.

    Raises:
        ValueError: l holds more than one value, or the step has B = 0 (no such step is run).
    """
    if l.numel() != 1:
        raise ValueError(
            f"the local sum must be one value, got shape {list(l.shape)}; sum with microbatch.mean"
        )
    if step.loss_denominator <= 0:
        raise ValueError(
            f"the step's loss denominator B is {step.loss_denominator}; a step without trained "
            "tokens is passed over, never run"
        )
    shares = step.num_microbatches * layout.dp_cp
    factor = 1.0 if calculate_per_token_loss else float(shares)
    num_tokens = _num_tokens(0 if calculate_per_token_loss else 1, l.device)
    loss = (l.reshape(()) if l.dim() else l) * (factor / step.loss_denominator)
    return loss, num_tokens, step.loss_denominator / shares


@functools.cache
def _num_tokens(number: int, device: torch.device) -> Tensor:
    return torch.full((), number, dtype=torch.int32, device=device)

"""The loss of a micro-batch, scaled so that the step's gradient is that of Σ w·x / B.

Seam: ``training.get_forward_backward_func``. Only training passes are touched; evaluation runs as
it is. A loss function that takes keyword ``microbatch``, ``sample_denoms`` or
``step_global_batch_size`` gets them, with the untouched output, and returns l = Σ w·x over its
local tokens. Any other one is handed token losses that are weighted already, and must return
their sum.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_dynbatch.errors import LossFunctionError
from megatron_dynbatch.hooks.admission import check_model
from megatron_dynbatch.hooks.aux_loss import begin_schedule, watch_backward
from megatron_dynbatch.hooks.balance import begin_balance
from megatron_dynbatch.hooks.first_batch import checking_first_batch, naming_missing_keys
from megatron_dynbatch.hooks.non_finite import naming_non_finite
from megatron_dynbatch.hooks.report import reduced_reports
from megatron_dynbatch.hooks.session import Session, session
from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.losses.scaling import megatron_loss
from megatron_dynbatch.report import Metric

LossFunction = Callable[..., tuple[Any, ...]]

_KEYWORDS = ("microbatch", "sample_denoms", "step_global_batch_size")


def getting_forward_backward(get: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_forward_backward_func``: its result scales the loss while the flag is on."""

    @functools.wraps(get)
    def get_scaled(*positional: Any, **named: Any) -> Callable[..., Any]:
        return _scaled_schedule(get(*positional, **named))

    return get_scaled


def _scaled_schedule(schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def run_schedule(*, forward_step_func: Callable[..., Any], **named: Any) -> Any:
        run = session()
        if run is None or run.step is None or named.get("forward_only", False):
            return schedule(forward_step_func=forward_step_func, **named)
        if not run.model_checked:
            model = named["model"]
            check_model(model if isinstance(model, list) else [model], run.options.admitted)
            run.model_checked = True
        if run.options.has_aux_losses:
            begin_schedule(run, named["model"])
            begin_balance(run, schedule, _numbered_forward_step(run, forward_step_func), named)
        forward_step_func = _scaled_forward_step(run, forward_step_func)
        with checking_first_batch(run, named["model"]), naming_non_finite(run):
            reports = schedule(forward_step_func=forward_step_func, **named)
        return reduced_reports(reports)

    return run_schedule


def _numbered_forward_step(run: Session, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Selects the micro-batch before each pass of each model chunk."""
    # Each model chunk runs the step's micro-batches in order, in a replay from the start again.
    done: Counter[int] = Counter()

    @functools.wraps(forward_step)
    def numbered(data_iterator: Any, model: Any, *rest: Any, **named: Any) -> Any:
        run.select(done[id(model)])
        done[id(model)] += 1
        with naming_missing_keys():
            return forward_step(data_iterator, model, *rest, **named)

    return numbered


def _scaled_forward_step(run: Session, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    numbered = _numbered_forward_step(run, forward_step)

    @functools.wraps(forward_step)
    def scaled(data_iterator: Any, model: Any, *rest: Any, **named: Any) -> Any:
        output, loss_function = numbered(data_iterator, model, *rest, **named)
        micro_batch = run.current
        assert micro_batch is not None
        if run.options.has_aux_losses:
            watch_backward(run, run.current_index, output)
        if loss_function is None:
            return output, None
        return output, functools.partial(_scaled_loss, run, micro_batch, loss_function)

    return scaled


def _scaled_loss(
    run: Session, micro_batch: MicroBatch, loss_function: LossFunction, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Metric]]:
    wanted = _wanted_keywords(loss_function)
    if wanted:
        offered = {
            "microbatch": micro_batch,
            "sample_denoms": micro_batch.sample_denoms,
            "step_global_batch_size": micro_batch.step.step_global_batch_size,
        }
        result = loss_function(output, **{name: offered[name] for name in wanted})
    else:
        weighted = weighted_output(output, micro_batch)
        micro_batch.summed["loss"] = output.detach()
        result = loss_function(weighted)
    local_sum, report = result[0], result[-1]
    if not isinstance(local_sum, torch.Tensor) or local_sum.numel() != 1:
        raise LossFunctionError(
            f"the loss function must return one scalar tensor first, not {_describe(local_sum)}"
        )
    run.loss_sums.append((micro_batch, local_sum.detach()))
    per_token = run.options.per_token_loss
    loss, num_tokens, report_count = megatron_loss(
        local_sum, micro_batch.step, run.layout, calculate_per_token_loss=per_token
    )
    return loss, num_tokens, _typed(report, report_count)


def weighted_output(output: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """Token losses times token weights, masked positions selected away.

    Args:
        output: What the model returned: token losses, [1, T_local] or any shape of T_local values.
        micro_batch: Gives mask and weights of the same tokens.

    Raises:
        LossFunctionError: The output is not one value per local token.
    """
    weights = micro_batch.token_weights
    if output.dtype == torch.float32:
        weights = micro_batch.float_weights
    if output.numel() != weights.numel():
        raise LossFunctionError(
            f"the model's output has shape {tuple(output.shape)} but the micro-batch has "
            f"{weights.numel()} local tokens: a loss function without keyword `microbatch` needs "
            "token losses [1, T_local] (labels passed to the model); one that computes its own "
            "loss from logits must take keyword `microbatch` and use microbatch.mean(x)"
        )
    untrained = micro_batch.untrained
    if output.shape != untrained.shape:
        untrained = untrained.view(output.shape)
    if output.shape != weights.shape:
        weights = weights.view(output.shape)
    return output.masked_fill(untrained, 0.0) * weights.to(output.dtype)


def _typed(report: Mapping[str, Any], report_count: float) -> dict[str, Metric]:
    """Local sums as means whose counts add up to B; metrics that have a kind as they are."""
    typed = {}
    for name, value in report.items():
        if not isinstance(value, Metric):
            if isinstance(value, torch.Tensor):
                value = value.detach() if value.requires_grad else value
                value = value[0] if value.dim() else value  # [sum, count], as stock scripts have it
            value = Metric.mean(value, report_count)
        typed[name] = value
    return typed


def _wanted_keywords(loss_function: LossFunction) -> tuple[str, ...]:
    function = loss_function
    while isinstance(function, functools.partial):
        function = function.func
    wanted = _accepted_keywords(function)
    while wanted and isinstance(loss_function, functools.partial):
        wanted = tuple(name for name in wanted if name not in loss_function.keywords)
        loss_function = loss_function.func
    return wanted


@functools.cache
def _accepted_keywords(function: LossFunction) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters
    return tuple(name for name in _KEYWORDS if name in parameters)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"

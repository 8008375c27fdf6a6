"""One step of a user's script, run in several ways inside the training that was launched.

Stands around Megatron's `train_step`: in the first step every variant is run by the real training
code (zeroed buffers, schedule, gradient reduction) with an optimizer step that keeps gradients and
changes nothing. Where a rank has the whole model, each sample alone is run by plain autograd
instead, without schedule, packing, and the plugin's scaling.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_dynbatch.cli.model_variants import (
    Variant,
    as_step,
    can_be_plain,
    token_weights,
    variants,
)
from megatron_dynbatch.hooks import loss as loss_hook
from megatron_dynbatch.hooks.session import Session, session
from megatron_dynbatch.steps import Step


@dataclass
class Measured:
    """What a variant gave on this rank.

    Attributes:
        loss: This rank's part of L = Σ w·x / B; 0 where the stage has no loss.
        metrics: Name → reported value, on the last stage.
        gradients: Name → gradient on the host, the loss scale taken out.
    """

    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict, repr=False)


class StepMeasured(BaseException):
    """Ends the training after the step was measured; no handler of errors may catch it.

    Args:
        ways: The variants.
        found: Variant → what it gave on this rank.
    """

    def __init__(self, ways: Sequence[Variant], found: Mapping[str, Measured]) -> None:
        super().__init__("the step was measured")
        self.ways, self.found = ways, found


@contextlib.contextmanager
def measuring_first_step() -> Iterator[None]:
    """Context in which the first training step of a script raises `StepMeasured`."""
    from megatron.training import training

    train_step = training.train_step

    @functools.wraps(train_step)
    def measured(*positional: Any, **named: Any) -> Any:
        run = session()
        if run is None or run.step is None:
            raise ValueError("verify --model needs --dynamic-global-batch, and a step to run")
        bound = inspect.signature(train_step).bind(*positional, **named)
        raise StepMeasured(*_measure(run, train_step, bound))

    training.train_step = measured
    try:
        yield
    finally:
        training.train_step = train_step


def _measure(
    run: Session, train_step: Callable[..., Any], bound: inspect.BoundArguments
) -> tuple[list[Variant], dict[str, Measured]]:
    opened, schedule = run.step, bound.arguments["forward_backward_func"]
    assert opened is not None
    samples = _samples_of_all_ranks(opened)
    capacity = run.options.plan.capacity(run.layout)
    assert capacity is not None
    ways = variants(opened.plan, opened.step_plan, capacity)
    found = {}
    # The plan comes first: in it the script is looked at.
    for way in sorted(ways, key=lambda way: way.is_alone):
        run.step = as_step(opened, samples, way, run.feed.width)
        is_unpacked = way.is_alone and run.layout.cp == 1
        is_plain = way.is_alone and can_be_plain(run.layout) and not run.options.mtp_num_layers
        measured = found[way.name] = Measured()
        bound.arguments["forward_backward_func"] = (
            functools.partial(_plain_autograd, run, samples, measured) if is_plain else schedule
        )
        with _unpacked(bound.arguments["model"]) if is_unpacked else contextlib.nullcontext():
            _run(train_step, bound, measured, is_plain)
    return ways, found


def _samples_of_all_ranks(step: Step) -> dict[int, Any]:
    """Plan row → sample of this step, as the ranks that train them have them."""
    from megatron.core import mpu

    rows = set(step.step_plan.samples.tolist())
    own = {row: sample for row, sample in step.samples.items() if row in rows}
    parts: list[Any] = [None] * mpu.get_data_parallel_world_size()
    dist.all_gather_object(parts, own, group=mpu.get_data_parallel_group())
    return {row: sample for part in parts for row, sample in part.items()}


@contextlib.contextmanager
def _unpacked(model: Sequence[nn.Module]) -> Iterator[None]:
    """Models are told of no packing: one sample is an ordinary causal sequence."""
    from megatron_dynbatch.hooks.first_batch import language_models

    def unpack(
        part: Any, positional: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.signature(part.forward).bind_partial(*positional, **named)
        bound.arguments["packed_seq_params"] = None
        return bound.args, bound.kwargs

    hooks = [
        part.register_forward_pre_hook(unpack, with_kwargs=True)
        for part in language_models(list(model))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _run(
    train_step: Callable[..., Any],
    bound: inspect.BoundArguments,
    measured: Measured,
    is_plain: bool,
) -> None:
    """Megatron's training step, but for the update."""
    optimizer, model = bound.arguments["optimizer"], bound.arguments["model"]
    scale_loss = loss_hook.megatron_loss

    def noting(l: Tensor, step: Any, *rest: Any, **named: Any) -> Any:  # noqa: E741 - its name
        measured.loss += float(l.detach().sum()) / step.loss_denominator
        return scale_loss(l, step, *rest, **named)

    def keep() -> tuple[bool, float, None]:
        if is_plain:
            measured.gradients = _gradients(model, 1.0)
        else:
            _gather_shards(model, optimizer)
            measured.gradients = _gradients(model, float(optimizer.get_loss_scale()))
        return False, 0.0, None  # not updated: the learning rate stands still too

    update, optimizer.step = optimizer.step, keep
    loss_hook.megatron_loss = noting
    try:
        losses = train_step(*bound.args, **bound.kwargs)[0]
    finally:
        optimizer.step, loss_hook.megatron_loss = update, scale_loss
    measured.metrics = {name: float(value) for name, value in losses.items()}


def _plain_autograd(
    run: Session,
    samples: Mapping[int, Any],
    measured: Measured,
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Sequence[Any],
    **unused: Any,
) -> list[dict[str, Any]]:
    """In the schedule's place: Σ w·x / B of each sample alone, summed over samples and ranks."""
    (chunk,) = model
    step = run.step
    assert step is not None
    run.aux_scales.clear()
    with chunk.no_sync():
        for k in range(step.num_microbatches):
            micro_batch = run.select(k)
            if run.options.num_experts:
                _scale_router_losses(step, k)
            output, loss_function = forward_step_func(data_iterator, chunk)
            keywords = loss_hook._wanted_keywords(loss_function)
            if keywords:
                offered = {"microbatch": micro_batch, "sample_denoms": micro_batch.sample_denoms,
                           "step_global_batch_size": step.step_global_batch_size}  # fmt: skip
                value = loss_function(output, **{name: offered[name] for name in keywords})[0]
            else:
                weights = _weights(step, k, samples, output)
                value = loss_function(output.masked_fill(weights == 0, 0.0) * weights)[0]
            value = value.sum() / step.step_plan.loss_denominator
            measured.loss += float(value.detach())
            value.backward()
    _sum_over_ranks(chunk)
    return [{}]


def _scale_router_losses(step: Step, k: int) -> None:
    """A loss term of the router counts by the tokens of its sample."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    share = int(step.packed(k).pack.total_lengths.sum()) / step.num_tokens
    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor([share], device=step.device)


def _weights(step: Step, k: int, samples: Mapping[int, Any], like: Tensor) -> Tensor:
    """w of every token of a micro-batch of one sample, or of none: by docs/semantics.md alone."""
    weights = torch.zeros(like.numel(), dtype=torch.float64)
    for row in step.step_plan.micro_batches[step.dp_rank][k]:
        values = token_weights(step.plan, row, samples)
        # The prediction of a token is made at the token before it.
        first = samples[row].total_length - len(values) - 1
        for place, value in enumerate(values, start=first):
            if place >= 0:
                weights[place] = value
    return weights.to(like.device, like.dtype).view(like.shape)


def _sum_over_ranks(chunk: Any) -> None:
    from megatron.core import mpu

    for _, parameter in _named(chunk):
        is_expert = not getattr(parameter, "allreduce", True)
        group = mpu.get_expert_data_parallel_group() if is_expert else mpu.get_data_parallel_group()
        dist.all_reduce(parameter.main_grad, group=group)


def _gather_shards(model: Sequence[Any], optimizer: Any) -> None:
    """Under the distributed optimizer each rank has reduced its own shard only: bring all."""
    if not optimizer.config.use_distributed_optimizer:
        return
    for chunk in model:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            size = group.intra_distributed_optimizer_instance_size
            rank = group.intra_distributed_optimizer_instance_rank
            for bucket in group.buckets:
                own = bucket.grad_data.chunk(size)[rank].clone()
                dist.all_gather_into_tensor(
                    bucket.grad_data, own, group=group.intra_distributed_optimizer_instance_group
                )


def _named(chunk: Any) -> Iterator[tuple[str, Any]]:
    from megatron.core.utils import unwrap_model

    for name, parameter in unwrap_model(chunk).named_parameters():
        if parameter.requires_grad:
            yield name, parameter


def _gradients(model: Sequence[Any], loss_scale: float) -> dict[str, Tensor]:
    """Name → gradient in float32 or wider, on the host."""
    found = {}
    for number, chunk in enumerate(model):
        for name, parameter in _named(chunk):
            gradient = parameter.main_grad.detach()
            wide = gradient if gradient.dtype == torch.float64 else gradient.float()
            prefix = f"chunk {number}: " if len(model) > 1 else ""
            found[prefix + name] = (wide / loss_scale).cpu().clone()
    return found

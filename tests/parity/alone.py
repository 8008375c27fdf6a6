"""Every sample alone and unpacked through Megatron's own model, in plain autograd.

The reference for models that are not written out in `reference_model`: no pack, no padding, no
micro-batch, no parallelism, no schedule and no hook; the loss and the weights of auxiliary terms
are the formulas of semantics.md over the whole step.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tests.parity.architecture import Architecture
from tests.parity.float64 import keep_float64
from tests.parity.job import NOTES
from tests.parity.reference import Recipe, denominators_of
from tests.parity.reference_aux import Auxiliary, Partition
from tests.parity.reference_model import Forward, Routing
from tests.parity.rollouts import Example

type Alone = tuple[float, dict[str, Tensor]]
"""The loss of the step, and global name → gradient of it with all auxiliary terms."""

EMBEDDING = "embedding.word_embeddings.weight"
BY_TOKENS, BY_SAMPLES = "tokens", "samples"


def start_from_drawn_weights() -> None:
    """Let Megatron's loop of this process begin with parameters drawn by global name."""
    from megatron.training import training

    keep_float64()
    loop = training.train

    def train(*positional: Any, **named: Any) -> Any:
        given = inspect.signature(loop).bind(*positional, **named).arguments
        draw_weights(given["model"])
        given["optimizer"].reload_model_params()
        return loop(*positional, **named)

    train.__signature__ = inspect.signature(loop)  # type: ignore[attr-defined]
    training.train = train


def draw_weights(model: Sequence[Any]) -> None:
    """Large enough that attention and routing are far from uniform; norms near 1."""
    from tests.cpu.weights import _tensor_parallel, cut, global_parameters

    for name, parameter in global_parameters(model):
        size, rank = _tensor_parallel(name, parameter)
        if getattr(parameter, "shared_embedding", False):  # the last stage has a copy
            name = EMBEDDING
        shape = list(parameter.shape)
        if size > 1:
            shape[parameter.partition_dim] *= size
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.randn(shape, generator=generator)
        is_scale = "norm" in name and name.endswith("weight")
        full = 1.0 + 0.1 * full if is_scale else 0.25 * full
        with torch.no_grad():
            parameter.copy_(cut(full, parameter, size, rank))


def measure_alone(examples: Sequence[Example], recipe: Recipe, weighted_by: str) -> None:
    """Replace Megatron's loop in this process: note an `Alone`, and end.

    Args:
        examples: The step.
        recipe: Gives the reduction.
        weighted_by: What terms of routers are means over, BY_TOKENS or BY_SAMPLES.
    """
    _instead_of_training(
        lambda model: _loss_and_gradients(model, examples, recipe, weighted_by)
    )


def closed_forms(
    examples: Sequence[Example], recipe: Recipe, auxiliary: Auxiliary, partition: Partition
) -> None:
    """The same for a model whose routers have no terms of their own: they are added as formulas.

    Args:
        examples: The step.
        recipe: Gives the reduction.
        auxiliary: Coefficients of the terms.
        partition: Which examples are in which micro-batch, for what is defined by micro-batch.
    """
    _instead_of_training(
        lambda model: _with_closed_forms(model, examples, recipe, auxiliary, partition)
    )


def _instead_of_training(measure: Callable[[Sequence[Any]], Alone]) -> None:
    from megatron.training import training

    keep_float64()
    loop = training.train

    def train(*positional: Any, **named: Any) -> NoReturn:
        given = inspect.signature(loop).bind(*positional, **named).arguments
        draw_weights(given["model"])
        NOTES.append(measure(given["model"]))
        raise SystemExit(0)

    train.__signature__ = inspect.signature(loop)  # type: ignore[attr-defined]
    training.train = train


def _with_closed_forms(
    chunks: Sequence[Any],
    examples: Sequence[Example],
    recipe: Recipe,
    auxiliary: Auxiliary,
    partition: Partition,
) -> Alone:
    from tests.cpu.weights import global_parameters

    forwards: list[Forward] = []
    with _noting_routers(forwards):
        loss, found = _loss_and_gradients(chunks, examples, recipe, BY_TOKENS, forwards)
    if not forwards[0].routings:
        return loss, found
    routing = forwards[0].routings[0]
    experts = routing.logits.shape[-1]
    architecture = Architecture(experts=experts, topk=int(routing.chosen[0].sum()))
    uniform = torch.full((experts,), architecture.topk / experts, dtype=torch.float64)
    layers = len(forwards[0].routings)
    terms = auxiliary.terms(forwards, examples, partition, architecture, [uniform] * layers)
    # Values are means over layers; the loss adds layers up.
    total = sum((c * value * layers for c, value in terms.values()), torch.zeros(()))
    if terms:
        parameters = dict(global_parameters(chunks))
        gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                found[name] += gradient
    return loss, found


@contextlib.contextmanager
def _noting_routers(forwards: list[Forward]) -> Iterator[None]:
    """Append a `Routing` to the last forward wherever a router of Megatron's routes."""
    from megatron.core.transformer.moe.router import TopKRouter

    routing = TopKRouter.routing

    @functools.wraps(routing)
    def noted(router: Any, logits: Tensor, *rest: Any, **named: Any) -> Any:
        flat = logits.view(-1, logits.shape[-1])
        scores = flat.softmax(-1)
        if router.score_function == "sigmoid":
            scores = torch.sigmoid(flat)
            scores = scores / scores.sum(-1, keepdim=True)
        none = torch.zeros_like(flat, dtype=torch.bool)
        likeliest = none.scatter(-1, flat.topk(router.topk, -1).indices, True)
        forwards[-1].routings.append(Routing(flat, scores, likeliest, likeliest))
        return routing(router, logits, *rest, **named)

    TopKRouter.routing = noted
    try:
        yield
    finally:
        TopKRouter.routing = routing


def _loss_and_gradients(
    chunks: Sequence[Any],
    examples: Sequence[Example],
    recipe: Recipe,
    weighted_by: str,
    forwards: list[Forward] | None = None,
) -> Alone:
    """Graphs stay where `forwards` is given, with an entry for each example appended to it."""
    from megatron.core.utils import unwrap_model

    from tests.cpu.weights import global_parameters

    (model,) = unwrap_model(list(chunks))
    parameters = dict(global_parameters(chunks))
    found = {name: torch.zeros_like(p) for name, p in parameters.items()}
    loss = 0.0
    denominators, count = denominators_of(examples, recipe)
    shares = _shares(examples, weighted_by)
    for example, denominator, _ in zip(examples, denominators, shares, strict=False):
        if forwards is not None:
            forwards.append(Forward(torch.empty(len(example.tokens), 0)))
        part = _part(model, example) / (max(denominator, 1.0) * count)
        loss += part.item()
        gradients = torch.autograd.grad(
            part, list(parameters.values()), allow_unused=True, retain_graph=forwards is not None
        )
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                found[name] += gradient
    return loss, found


def _shares(examples: Sequence[Example], weighted_by: str) -> Iterator[None]:
    """Set the scales of auxiliary terms for one example after the other."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    lengths = [len(e.tokens) for e in examples]
    # The first depth predicts token t + 2; Megatron divides by what is trained of it, or by 1.
    later = [sum(e.mask[max(0, 2 - len(e.tokens) + len(e.mask)) :]) for e in examples]
    for length, trained in zip(lengths, later, strict=True):
        share = length / sum(lengths) if weighted_by == BY_TOKENS else 1 / len(examples)
        MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(
            [share], dtype=torch.float64
        )
        MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(
            [max(trained, 1) / sum(later)], dtype=torch.float64
        )
        yield


def _part(model: Any, example: Example) -> Tensor:
    """Σ of the losses at trained tokens."""
    tokens = torch.tensor([example.tokens])
    length, response = len(example.tokens), len(example.mask)
    mask = torch.zeros(1, length)
    # Entry j of the mask is of token T − R + j, which the position before it predicts.
    for j, trained in enumerate(example.mask):
        if length - response + j >= 1:
            mask[0, length - response + j - 1] = trained
    labels = torch.cat([tokens[:, 1:], torch.zeros(1, 1, dtype=torch.int64)], 1)
    positions = torch.arange(length)[None]
    losses = model(tokens, positions, None, labels=labels, loss_mask=mask)
    return (losses.view(-1) * mask.view(-1)).sum()

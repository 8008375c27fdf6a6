"""Log-prob and entropy as torch operators: `torch.ops.megatron_dynbatch.logprob_*`.

Each has a CPU (and fallback) implementation in `reference.py`, a CUDA one in `kernels.py` and a
fake one for `torch.compile`. Autograd is attached in `function.py`, around the collective.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_dynbatch.logprob import kernels, reference
from megatron_dynbatch.reduce.ops import LIBRARY

SCHEMAS = (
    "logprob_statistics(Tensor logits, Tensor targets, Tensor? keep, SymInt columns, float scale, "
    "bool mean) -> Tensor",
    "logprob_combine(Tensor parts, Tensor? keep, float scale) -> (Tensor, Tensor, Tensor)",
    "logprob_backward(Tensor logits, Tensor targets, Tensor? keep, Tensor saved, "
    "Tensor? grad_logp, Tensor? grad_entropy, SymInt columns, float scale) -> Tensor",
    "logprob_backward_(Tensor(a!) logits, Tensor targets, Tensor? keep, Tensor saved, "
    "Tensor? grad_logp, Tensor? grad_entropy, SymInt columns, float scale) -> ()",
)
for _schema in SCHEMAS:
    LIBRARY.define(_schema)


def _backward_of(write: Callable[..., None], in_place: bool) -> Callable[..., Tensor | None]:
    def run(logits: Tensor, *rest: Any) -> Tensor | None:
        grad = logits if in_place else kernels.empty_beside(logits)
        write(logits, *rest, grad)
        return None if in_place else grad

    return run


TORCH: dict[str, Callable[..., Any]] = {
    "logprob_statistics": reference.statistics,
    "logprob_combine": reference.combine,
    "logprob_backward": _backward_of(reference.backward, in_place=False),
    "logprob_backward_": _backward_of(reference.backward, in_place=True),
}
CUDA: dict[str, Callable[..., Any]] = {
    "logprob_statistics": kernels.statistics,
    "logprob_combine": kernels.combine,
    "logprob_backward": _backward_of(kernels.backward, in_place=False),
    "logprob_backward_": _backward_of(kernels.backward, in_place=True),
}


def _on_cuda(name: str) -> Callable[..., Any]:
    """The kernel of an operator, or its torch implementation where kernels cannot run."""
    kernel, plain = CUDA[name], TORCH[name]

    def run(first: Tensor, *rest: Any) -> Any:
        return (kernel if kernels.supports(first) else plain)(first, *rest)

    return run


for _name, _function in TORCH.items():
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, _on_cuda(_name), "CUDA")


def _fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return torch.library.register_fake(f"megatron_dynbatch::{name}", lib=LIBRARY)


@_fake("logprob_statistics")
def _(logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty((logits.shape[0], 4), dtype=reference.compute_dtype(logits))


@_fake("logprob_combine")
def _(parts: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = parts.shape[1]
    return parts.new_empty(num_rows), parts.new_empty(num_rows), parts.new_empty((num_rows, 3))


@_fake("logprob_backward")
def _(logits: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(logits)


@_fake("logprob_backward_")
def _(logits: Tensor, *rest: Any) -> None:
    return None


OPS = torch.ops.megatron_dynbatch

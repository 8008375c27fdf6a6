"""The reductions as torch operators: `torch.ops.megatron_dynbatch.*`.

Each has a CPU (and fallback) implementation in `reference.py`, a CUDA one in `kernels.py`, a fake
one for `torch.compile`, and a backward that is itself an operator. Autograd is attached by a plain
`autograd.Function` on the Autograd key, which costs a third of `register_autograd` per call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_dynbatch.reduce import host_sums, kernels, policy_reference, reference
from megatron_dynbatch.reduce.exact import combine, to_limbs
from megatron_dynbatch.reduce.host_sums import Stretches

LIBRARY = torch.library.Library("megatron_dynbatch", "DEF")

SCHEMAS = (
    "weighted_sums(Tensor x, Tensor w) -> Tensor",
    "weighted_sums_backward(Tensor grad, Tensor w, ScalarType dtype) -> Tensor",
    "token_weights(Tensor masks, Tensor denoms, Tensor pieces, Tensor? sources, Tensor? samples, "
    "SymInt num_tokens) -> Tensor",
    "segment_sums(Tensor x, Tensor w, Tensor pieces, Tensor? samples, SymInt num_samples)"
    " -> (Tensor, Tensor)",
    "segment_sums_backward(Tensor grad_total, Tensor grad_samples, Tensor w, Tensor pieces, "
    "Tensor? samples, ScalarType dtype) -> Tensor",
    "exact_sums(Tensor x, Tensor w) -> Tensor",
    "exact_segment_sums(Tensor x, Tensor w, Tensor pieces, Tensor? samples, SymInt num_samples)"
    " -> (Tensor, Tensor)",
    "policy_loss(Tensor logp, Tensor old, Tensor advantages, Tensor w, Tensor? ref, "
    "Tensor? rollout, Tensor? entropy, int surrogate, float clip_low, float clip_high, "
    "float dual_clip, int kl, float kl_coef, float entropy_coef, int importance, float low, "
    "float high, Tensor? pieces, Tensor? samples, SymInt num_samples) -> (Tensor, Tensor, Tensor)",
)
for _schema in SCHEMAS:
    LIBRARY.define(_schema)


def _samples(samples: Tensor | None) -> Tensor:
    if samples is None:
        raise RuntimeError("a segment table without index was given to the torch implementation")
    return samples


def _token_weights(
    masks: Tensor,
    denoms: Tensor,
    pieces: Tensor,
    sources: Tensor | None,
    samples: Tensor | None,
    num_tokens: int,
) -> Tensor:
    return reference.token_weights(masks, denoms, _samples(sources), _samples(samples))


def _segment_sums(
    x: Tensor, w: Tensor, pieces: Tensor, samples: Tensor | None, num_samples: int
) -> tuple[Tensor, Tensor]:
    if x.device.type == "cpu":
        return host_sums.segment_sums(x, w, Stretches.of(pieces.numpy(), len(w)), num_samples)
    return reference.segment_sums(x, w, _samples(samples), num_samples)


def _segment_sums_backward(
    grad_total: Tensor,
    grad_samples: Tensor,
    w: Tensor,
    pieces: Tensor,
    samples: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if w.device.type == "cpu":
        stretches = Stretches.of(pieces.numpy(), len(w))
        return host_sums.segment_sums_backward(grad_total, grad_samples, w, stretches, dtype)
    return reference.segment_sums_backward(grad_total, grad_samples, w, _samples(samples), dtype)


def _exact_sums(x: Tensor, w: Tensor) -> Tensor:
    return combine(to_limbs(reference.selected(x, w) * w).sum(1))


def _exact_segment_sums(
    x: Tensor, w: Tensor, pieces: Tensor, samples: Tensor | None, num_samples: int
) -> tuple[Tensor, Tensor]:
    terms = to_limbs(reference.selected(x, w) * w)
    sums = terms.new_zeros(x.shape[0], num_samples + 1, 3).index_add_(1, _samples(samples), terms)
    per_sample = combine(sums[:, :num_samples])
    return combine(per_sample.sum(1)), per_sample


def _policy_loss(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *of_token, pieces, samples, num_samples = arguments
    terms, slope = policy_reference.policy_terms(*of_token)
    w = arguments[3]
    if pieces is None:
        return terms @ w, slope, w.new_empty(len(terms), 0)
    sums, per_sample = _segment_sums(terms, w, pieces, samples, num_samples)
    return sums, slope, per_sample


_TORCH: dict[str, Callable[..., Any]] = {
    "weighted_sums": reference.weighted_sums,
    "weighted_sums_backward": reference.weighted_sums_backward,
    "token_weights": _token_weights,
    "segment_sums": _segment_sums,
    "segment_sums_backward": _segment_sums_backward,
    "exact_sums": _exact_sums,
    "exact_segment_sums": _exact_segment_sums,
    "policy_loss": _policy_loss,
}


def _on_cuda(name: str) -> Callable[..., Any]:
    """The kernel of an operator, or its torch implementation where kernels cannot run."""
    kernel, plain = getattr(kernels, name), _TORCH[name]

    def run(*arguments: Any) -> Any:
        return kernel(*arguments) if kernels.supports(name, arguments) else plain(*arguments)

    return run


for _name, _function in _TORCH.items():
    LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, _on_cuda(_name), "CUDA")


def _spread_like(grad: Tensor, *rest: Any) -> Tensor:
    """[K, T] for the gradient of totals [K]; w [T] comes first, or after that of samples [K, B]."""
    w = next(t for t in rest if t.dim() == 1)
    return w.new_empty((grad.shape[0], w.shape[0]), dtype=rest[-1])


def _policy_like(
    logp: Tensor, old: Tensor, advantages: Tensor, w: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(logp.dtype, torch.float32)
    rows = len(policy_reference.METRICS)
    return w.new_empty(rows), torch.empty_like(logp, dtype=dtype), w.new_empty(rows, rest[-1])


def _limbs(w: Tensor, *shape: int) -> Tensor:
    return w.new_empty((*shape, 3), dtype=torch.int64)


# Results of the right shape, dtype and device, for compilers.
_FAKES: dict[str, Callable[..., Any]] = {
    "weighted_sums": lambda x, w: w.new_empty(x.shape[0]),
    "weighted_sums_backward": _spread_like,
    "token_weights": lambda masks, denoms, *rest: denoms.new_empty(rest[-1]),
    "segment_sums": lambda x, w, *rest: (
        w.new_empty(x.shape[0]),
        w.new_empty(x.shape[0], rest[-1]),
    ),
    "segment_sums_backward": _spread_like,
    "exact_sums": lambda x, w: _limbs(w, x.shape[0]),
    "exact_segment_sums": lambda x, w, *rest: (
        _limbs(w, x.shape[0]),
        _limbs(w, x.shape[0], rest[-1]),
    ),
    "policy_loss": _policy_like,
}
for _name, _function in _FAKES.items():
    torch.library.register_fake(f"megatron_dynbatch::{_name}", _function, lib=LIBRARY)


OPS = torch.ops.megatron_dynbatch


def eager_on_host(x: Tensor) -> bool:
    """Whether a call goes from autograd straight to the torch implementation on the host.

    The dispatcher between them is a third of the time of a small call; it is passed by where
    nothing watches operators (a compiler, a dispatch mode, a tensor subclass).
    """
    return (
        x.is_cpu
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
    )


class WeightedSums(torch.autograd.Function):
    """Autograd of weighted_sums; `direct`: without operators in between (see `eager_on_host`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, direct: bool = False) -> Tensor:
        ctx.save_for_backward(w)
        ctx.dtype, ctx.direct = x.dtype, direct
        if direct:
            return reference.weighted_sums(x, w)
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.weighted_sums.default(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (w,) = ctx.saved_tensors
        if ctx.direct:
            return reference.weighted_sums_backward(grads[0], w, ctx.dtype), None, None
        return OPS.weighted_sums_backward.default(grads[0], w, ctx.dtype), None, None


class SegmentSumsOnHost(torch.autograd.Function):
    """segment_sums and its gradient without operators in between (see `eager_on_host`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, stretches: Stretches, num_samples: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(w)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.stretches = x.dtype, stretches
        return host_sums.segment_sums(x, w, stretches, num_samples)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        (w,) = ctx.saved_tensors
        if grads[0] is None and grads[1] is None:
            return None, None, None, None
        dx = host_sums.segment_sums_backward(grads[0], grads[1], w, ctx.stretches, ctx.dtype)
        return dx, None, None, None


class _SegmentSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, pieces: Tensor, samples: Tensor | None, num_samples: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(w, pieces, samples)
        ctx.dtype = x.dtype
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.segment_sums.default(x, w, pieces, samples, num_samples)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        w, pieces, samples = ctx.saved_tensors
        dx = OPS.segment_sums_backward.default(
            grads[0].contiguous(), grads[1].contiguous(), w, pieces, samples, ctx.dtype
        )
        return dx, None, None, None, None


class _PolicyLoss(torch.autograd.Function):
    """Only row 0, the loss, has a gradient: in logp, and in entropy if that has a coefficient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        logp, w, entropy, entropy_coef = arguments[0], arguments[3], arguments[6], arguments[13]
        pieces, samples, _ = arguments[17:]
        with torch._C._AutoDispatchBelowAutograd():
            sums, slope, per_sample = OPS.policy_loss.default(*arguments)
        ctx.save_for_backward(w, slope, pieces, samples)
        ctx.dtypes = logp.dtype, None if entropy is None else entropy.dtype
        ctx.entropy_coef = entropy_coef
        ctx.mark_non_differentiable(slope)
        return sums, slope, per_sample

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        w, slope, pieces, samples = ctx.saved_tensors
        total, per_sample = grads[0][:1].contiguous(), grads[2][:1].contiguous()

        def spread(scale: float, weights: Tensor, dtype: torch.dtype) -> Tensor:
            if pieces is None:
                return OPS.weighted_sums_backward.default(scale * total, weights, dtype)[0]
            rest = (weights, pieces, samples, dtype)
            return OPS.segment_sums_backward.default(scale * total, scale * per_sample, *rest)[0]

        logp_dtype, entropy_dtype = ctx.dtypes
        if pieces is None:
            dlogp = (slope * total.to(slope.dtype)).to(logp_dtype)
        else:
            dlogp = spread(1.0, slope.to(torch.float64), logp_dtype)
        dentropy = None
        if entropy_dtype is not None and ctx.entropy_coef:
            dentropy = spread(-ctx.entropy_coef, w, entropy_dtype)
        return dlogp, *[None] * 5, dentropy, *[None] * 13


LIBRARY.impl("policy_loss", _PolicyLoss.apply, "Autograd")
LIBRARY.impl("weighted_sums", WeightedSums.apply, "Autograd")
LIBRARY.impl("segment_sums", _SegmentSums.apply, "Autograd")

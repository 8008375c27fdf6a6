"""The operators' registration: schema, fake kernels, autograd, and one graph for all shapes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.reduce_cpu import torch_calls
from megatron_dynbatch.reduce import host_sums, reference, segment_table, weighted_sums
from megatron_dynbatch.reduce.ops import OPS


def arguments(name, device="cpu", requires_grad=True):
    table = segment_table([7, 5, 6], [4, 0, 6], cp_size=2, cp_rank=1)
    index = table.on(torch.device("cpu"))
    pieces, sources, samples = (t.to(device) for t in (index.pieces, index.sources, index.samples))
    tokens = table.num_tokens
    w = torch.rand(tokens, dtype=torch.float64, device=device) * (samples < 3)
    x = torch.randn(2, tokens, device=device, requires_grad=requires_grad)
    total = torch.randn(2, dtype=torch.float64, device=device)
    per_sample = torch.randn(2, 3, dtype=torch.float64, device=device)
    masks = torch.ones(10, device=device)
    denoms = torch.rand(3, dtype=torch.float64, device=device)
    return {
        "weighted_sums": (x, w),
        "weighted_sums_backward": (total, w, torch.bfloat16),
        "token_weights": (masks, denoms, pieces, sources, samples, tokens),
        "segment_sums": (x, w, pieces, samples, 3),
        "segment_sums_backward": (total, per_sample, w, pieces, samples, torch.float32),
        "exact_sums": (x.detach(), w),
        "exact_segment_sums": (x.detach(), w, pieces, samples, 3),
    }[name]


NAMES = [
    "weighted_sums",
    "weighted_sums_backward",
    "token_weights",
    "segment_sums",
    "segment_sums_backward",
    "exact_sums",
    "exact_segment_sums",
]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    torch.library.opcheck(getattr(OPS, name).default, arguments(name))


@pytest.mark.parametrize("name", NAMES)
def test_fake_cuda_tensors_are_enough_for_shapes(name):
    with FakeTensorMode():
        fake = getattr(OPS, name).default(*arguments(name, "cuda", requires_grad=False))
    real = getattr(OPS, name).default(*arguments(name, requires_grad=False))
    for a, b in zip(*[r if isinstance(r, tuple) else (r,) for r in (fake, real)], strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert a.device.type == "cuda"


def test_one_graph_for_all_shapes():
    graphs = 0

    def count(graph, _):
        nonlocal graphs
        graphs += 1
        return graph

    def loss(x, w, pieces, samples, num_samples):
        total, per_sample = OPS.segment_sums(x * 2, w, pieces, samples, num_samples)
        return weighted_sums(x, w).sum() + total.sum() + per_sample.square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=count)
    for lengths in ([7, 5], [9, 9, 3], [30, 2, 4, 8]):
        table = segment_table(lengths, [n - 1 for n in lengths])
        index = table.on(torch.device("cpu"))
        w = torch.rand(table.num_tokens, dtype=torch.float64) * (index.samples < len(lengths))
        inputs = [torch.randn(3, table.num_tokens) for _ in range(1)]
        values = []
        for function in (loss, compiled):
            x = inputs[0].clone().requires_grad_()
            value = function(x, w, index.pieces, index.samples, table.num_samples)
            value.backward()
            values.append((value.item(), x.grad))
        assert values[0][0] == pytest.approx(values[1][0], rel=1e-12)
        torch.testing.assert_close(values[0][1], values[1][1])
    assert graphs == 1


@pytest.mark.parametrize("shape", [(1, 1), (8, 40)])
def test_torch_calls_do_not_grow(shape):
    num_values, num_samples = shape
    table = segment_table([9] * num_samples, [8] * num_samples)
    samples = torch.from_numpy(table.samples)
    x, w = torch.ones(num_values, table.num_tokens), (samples < num_samples).double()
    grad = torch.ones(num_values, dtype=torch.float64)
    per_sample = torch.ones(num_values, num_samples, dtype=torch.float64)
    for function, arguments in (
        (reference.weighted_sums, (x, w)),
        (reference.weighted_sums_backward, (grad, w, torch.float32)),
        (host_sums.segment_sums, (x, w, table.stretches, num_samples)),
        (host_sums.segment_sums_backward, (grad, per_sample, w, table.stretches, torch.float32)),
    ):
        assert torch_calls(function, *arguments) <= 6, function.__name__

"""The operators' registration: schema, fake kernels, one graph for all shapes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_dynbatch.logprob import vocab_parallel_logprob_entropy
from megatron_dynbatch.logprob.ops import OPS


def arguments(name, device="cpu"):
    logits = torch.randn(5, 7, device=device)
    targets = torch.arange(5, device=device)
    keep = torch.tensor([True, True, False, True, True]).to(device)
    saved = torch.tensor([[1.0, 2.0, 0.5]] * 5).to(device)
    slopes = torch.ones(5, device=device), None
    return {
        "logprob_statistics": (logits, targets, keep, 6, 0.7, True),
        "logprob_combine": (torch.rand(2, 5, 4, device=device), keep, 0.7),
        "logprob_backward": (logits, targets, keep, saved, *slopes, 6, 0.7),
        "logprob_backward_": (logits, targets, keep, saved, *slopes, 6, 0.7),
    }[name]


NAMES = ["logprob_statistics", "logprob_combine", "logprob_backward", "logprob_backward_"]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    torch.library.opcheck(getattr(OPS, name).default, arguments(name))


@pytest.mark.parametrize("name", NAMES)
def test_fake_cuda_tensors_are_enough_for_shapes(name):
    with FakeTensorMode():
        fake = getattr(OPS, name).default(*arguments(name, "cuda"))
    real = getattr(OPS, name).default(*arguments(name))
    for a, b in zip(*[r if isinstance(r, tuple) else (r,) for r in (fake, real)], strict=True):
        if b is not None:
            assert a.shape == b.shape and a.dtype == b.dtype and a.device.type == "cuda"


def test_one_graph_for_all_shapes():
    graphs = 0

    def count(graph, _):
        nonlocal graphs
        graphs += 1
        return graph

    def loss(logits, targets, mask):
        logp, entropy = vocab_parallel_logprob_entropy(
            logits * 2, targets, mask=mask, entropy="grad", temperature=0.9, inplace_backward=True
        )
        return logp.sum() - 0.1 * entropy.square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=count)
    for num_rows, width in ((4, 9), (7, 12), (33, 17)):
        leaf = torch.randn(num_rows, width)
        targets = torch.randint(width, (num_rows,))
        mask = torch.arange(num_rows) % 3
        values = []
        for function in (loss, compiled):
            x = leaf.clone().requires_grad_()
            value = function(x, targets, mask)
            value.backward()
            values.append((value.item(), x.grad))
        assert values[0][0] == pytest.approx(values[1][0], rel=1e-6)
        torch.testing.assert_close(values[0][1], values[1][1])
    assert graphs == 1

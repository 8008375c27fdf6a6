"""Vocabulary-parallel log-probs: gloo ranks against the whole vocabulary and Megatron's own."""

import pytest
import torch
import torch.distributed as dist

from megatron_dynbatch.losses.logprob import vocab_parallel_logprob_entropy
from tests.pool import run_ranks

ROWS, VOCAB = 9, 24

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * 3
    # The first ranks' parts of row 0 are forbidden as a whole, as top-k sampling does.
    logits[0, : VOCAB // 2] = -torch.inf
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    targets[0] = VOCAB - 1
    return logits.to(dtype), targets


def _results(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup | None
) -> Results:
    logits = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprob_entropy(
        logits, targets, temperature=0.8, entropy="grad", tp_group=group
    )
    assert entropy is not None
    (logp.sum() + 0.3 * entropy.sum()).backward()
    assert logits.grad is not None
    return logp.detach(), entropy.detach(), logits.grad


def job() -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    logits, targets = _inputs(torch.float64)
    part = logits.chunk(size, 1)[rank]
    whole = _results(logits, targets, None)
    mine = _results(part, targets, group)
    torch.testing.assert_close(mine[0], whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine[1], whole[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine[2], whole[2].chunk(size, 1)[rank], rtol=1e-12, atol=1e-12)

    part = part.float().contiguous()
    before = part.clone()
    ours, _ = vocab_parallel_logprob_entropy(part, targets, tp_group=group)
    assert torch.equal(part, before)
    theirs = vocab_parallel_cross_entropy(part.clone()[:, None], targets[:, None], 0.0, group)
    torch.testing.assert_close(ours, -theirs[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks(size: int) -> None:
    run_ranks(size, job)

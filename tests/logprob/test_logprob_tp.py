"""Vocabulary-parallel log-probs: gloo ranks against the whole vocabulary and Megatron's own."""

import pytest
import torch
import torch.distributed as dist

from megatron_dynbatch.logprob import vocab_parallel_logprob_entropy
from tests.pool import run_ranks

ROWS, VOCAB = 9, 24

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * 3
    # The first ranks' parts of row 0 are forbidden as a whole, as top-k sampling does; the others
    # lie far below 0.
    logits[0, : VOCAB // 2] = -torch.inf
    logits[0, VOCAB // 2 :] -= 1e4
    targets = torch.randint(17, (ROWS,), generator=generator)
    targets[0], targets[1] = 16, VOCAB  # row 1 does not count
    logits[1] = torch.nan
    return logits.to(dtype), targets, torch.arange(ROWS) != 1


def _results(
    part: torch.Tensor,
    group: dist.ProcessGroup | None,
    targets: torch.Tensor,
    mask: torch.Tensor,
    vocab_size: int | None,
    in_place: bool = False,
) -> Results:
    leaf = part.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprob_entropy(
        leaf * 1 if in_place else leaf,
        targets,
        mask=mask,
        temperature=0.8,
        entropy="grad",
        tp_group=group,
        vocab_size=vocab_size,
        inplace_backward=in_place,
    )
    assert entropy is not None
    (logp.sum() + 0.3 * entropy.sum()).backward()
    assert leaf.grad is not None
    return logp.detach(), entropy.detach(), leaf.grad


def job() -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        logits, targets, mask = _inputs(dtype)
        # Without padding; with the padding of a last part; with a last part that is all padding.
        for vocab_size in (None, 22, 17):
            rest = (targets, mask, vocab_size)
            whole = _results(logits, None, *rest)
            part = logits.chunk(size, 1)[rank].contiguous()
            for in_place in (False, True):
                mine = _results(part, group, *rest, in_place)
                right = (*whole[:2], whole[2].chunk(size, 1)[rank])
                # Results are float32 at least; only the gradient is rounded to the logits' type.
                for got, want, bound in zip(mine, right, (1e-6, 1e-6, tolerance), strict=True):
                    bound = min(bound, tolerance)
                    torch.testing.assert_close(got, want, rtol=bound, atol=bound)

    part = torch.randn(ROWS, VOCAB // size, generator=torch.Generator().manual_seed(rank)) * 3
    targets = torch.arange(ROWS)
    before = part.clone()
    ours, _ = vocab_parallel_logprob_entropy(part, targets, tp_group=group)
    assert torch.equal(part, before)
    theirs = vocab_parallel_cross_entropy(part.clone()[:, None], targets[:, None], 0.0, group)
    torch.testing.assert_close(ours, -theirs[:, 0], rtol=0, atol=1e-5)
    empty, _ = vocab_parallel_logprob_entropy(part[:0], targets[:0], tp_group=group)
    assert empty.shape == (0,)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks(size: int) -> None:
    run_ranks(size, job)

"""Vocabulary-parallel log-probs: two gloo ranks against the whole vocabulary and Megatron's own."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_dynbatch.losses.logprob import vocab_parallel_logprob_entropy

ROWS, VOCAB = 9, 24


def _inputs(dtype):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * 3
    # One rank's part of row 0 is forbidden as a whole, as top-k sampling does.
    logits[0, : VOCAB // 2] = -torch.inf
    targets = torch.randint(VOCAB, (ROWS,), generator=generator)
    targets[0] = VOCAB - 1
    return logits.to(dtype), targets


def _results(logits, targets, group):
    logits = logits.clone().requires_grad_()
    logp, entropy = vocab_parallel_logprob_entropy(
        logits, targets, temperature=0.8, entropy="grad", tp_group=group
    )
    (logp.sum() + 0.3 * entropy.sum()).backward()
    return logp.detach(), entropy.detach(), logits.grad


def _worker(rank, store):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = dist.group.WORLD
    logits, targets = _inputs(torch.float64)
    part = logits.chunk(2, 1)[rank]
    whole = _results(logits, targets, None)
    mine = _results(part, targets, group)
    torch.testing.assert_close(mine[0], whole[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine[1], whole[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(mine[2], whole[2].chunk(2, 1)[rank], rtol=1e-12, atol=1e-12)

    part = part.float().contiguous()
    before = part.clone()
    ours, _ = vocab_parallel_logprob_entropy(part, targets, tp_group=group)
    assert torch.equal(part, before)
    theirs = vocab_parallel_cross_entropy(part.clone()[:, None], targets[:, None], 0.0, group)
    torch.testing.assert_close(ours, -theirs[:, 0], rtol=0, atol=1e-5)
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    pytest.importorskip("megatron.core")
    # fork: the children keep what the parent has imported, which takes most of the time.
    mp.start_processes(_worker, args=(tmp_path / "store",), nprocs=2, start_method="fork")

"""What an asynchronous checkpoint holds: the weights when it was begun, not when it was written."""

from __future__ import annotations

import pickle

import torch

from tests.pool import run_ranks


def staged_then_trained() -> list[float]:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    weight = torch.ones(3)
    bucket = ("file", "key", ([], [("weight", weight)]))
    # As Megatron hands it to its writer process.
    stage = pickle.loads(pickle.dumps(FileSystemWriterAsync.preload_tensors))
    ((file, key, (data, ((item, staged),))),) = stage([bucket], True)
    assert (file, key, data, item) == ("file", "key", [], "weight")
    weight += 1  # the next step
    return list(staged.tolist())


def test_the_next_step_does_not_change_what_is_written() -> None:
    assert run_ranks(1, staged_then_trained, process_group=False) == [[1.0, 1.0, 1.0]]

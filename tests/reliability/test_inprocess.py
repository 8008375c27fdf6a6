"""A training begins anew in processes that live on, as under Megatron's --inprocess-restart.

nvidia-resiliency-ext itself needs GPUs; this does what Megatron's wrapper of `pretrain` has it do:
abort the process groups, destroy Megatron's global state, call again with a store of the same
server under the number of the attempt.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.parity.job import OWN_SCRIPT, Cell
from tests.parity.reference import Recipe
from tests.parity.rollouts import make_steps, write_batches
from tests.pool import ROOT, run_ranks
from tests.reliability.kills import BATCHES, NUM_STEPS, TOTAL, rows, run_flags


class Fault(Exception):
    """What ends an attempt."""


def attempts(argv: list[str], folder: Path, nth: int) -> int:
    """Call pretrain until it ends by itself; how often it took."""
    from megatron import training as package
    from megatron.training import training

    from megatron_dynbatch import hooks
    from megatron_dynbatch.run import Launch, run_target

    hooks.install()
    sys.path.append(str(ROOT))
    store, pretrain = dist.FileStore(str(folder / "store"), 2), package.pretrain
    for attempt in range(2):
        number = SimpleNamespace(iteration=attempt)
        package.pretrain = functools.partial(pretrain, store=store, inprocess_call_wrapper=number)
        try:
            with_fault(nth if attempt == 0 else 0)
            run_target(Launch(str(OWN_SCRIPT), False, tuple(argv), cpu=True))
            return attempt + 1
        except Fault:
            pass
        dist.destroy_process_group()
        training.destroy_global_state()
    raise AssertionError("unreachable")


def with_fault(nth: int) -> None:
    """Let the nth forward pass fail, 0: none; the wrapper ends it on all ranks."""
    from megatron.core.models.gpt import GPTModel

    forward = getattr(GPTModel.forward, "__wrapped__", GPTModel.forward)
    calls = 0

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise Fault
        return forward(*args, **kwargs)

    GPTModel.forward = counted


# In the third step, after the first checkpoint; and in the first step.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nth", [8, 2])
def test_a_training_that_begins_anew_in_its_processes_goes_on_at_the_cursor(
    nth: int, tmp_path: Path
) -> None:
    rollouts = tmp_path / "rollouts"
    write_batches(rollouts, make_steps(BATCHES, seed=2))
    found = []
    for fault in (0, nth):
        folder = tmp_path / f"fault-{fault}"
        folder.mkdir()
        # The other format writes from processes of its own, which take longer than all else.
        flags = {**run_flags(rollouts, folder), "ckpt-format": "torch", "keep-batches": None}
        argv = Cell(2, flags, Recipe(decay=TOTAL, warmup=4)).argv()
        took = run_ranks(2, attempts, argv, folder, fault, process_group=False, timeout=250.0)
        assert took == [1 + bool(fault)] * 2
        found.append(rows(folder))
    whole, restarted = found
    assert [row.iteration for row in whole] == list(range(1, NUM_STEPS + 1))
    assert {row.iteration for row in restarted} == {row.iteration for row in whole}
    assert restarted == [whole[row.iteration - 1] for row in restarted]

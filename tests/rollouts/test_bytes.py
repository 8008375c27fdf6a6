"""What 32 data-parallel ranks read of a batch: hardly more than their own rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_dynbatch.handshake import publish_layout, rows_by_rank, write_planned
from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.rollouts import RolloutDirectory, Sample

LAYOUT = ParallelLayout(dp=32)
OPTIONS = PlanOptions(max_tokens_per_gpu=16384)


def bytes_read(action: Callable[[], object]) -> int:
    """Bytes that this process asks the kernel for during `action`."""

    def total() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    own = -total() + total()  # what looking at the counter costs
    before = total()
    action()
    return total() - before - own


def agentic_samples(count: int, median: int, columns: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for row in range(count):
        length = int(np.clip(rng.lognormal(np.log(median), 0.8), 16, 16000))
        names = ("rollout_log_probs", "ref_log_probs", "values")[:columns]
        response = max(1, int(0.7 * length))
        fields = {name: rng.normal(size=response) for name in names}
        tokens = rng.integers(0, 150_000, length)
        samples.append(Sample(tokens, response, rollout_id=row // 4, advantage=1.0, **fields))
    return samples


def own_bytes(samples: Sequence[Sample], columns: int) -> float:
    """Four bytes a token and an optional value, one bit a mask entry; nothing else counts."""
    tokens = sum(sample.total_length for sample in samples)
    response = sum(sample.response_length for sample in samples)
    return 4 * tokens + response / 8 + 4 * columns * response


PLANNED_FOR = {"planned": LAYOUT, "planned for others": ParallelLayout(dp=24), "unplanned": None}


@pytest.mark.parametrize(("count", "median", "columns"), [(256, 400, 0), (2048, 300, 2)])
@pytest.mark.parametrize("planned_for", PLANNED_FOR)
def test_each_of_32_ranks_reads_its_rows(
    tmp_path: Path, planned_for: str, count: int, median: int, columns: int
) -> None:
    """Whether the batch came with the plan that is trained, with another one, or with none."""
    directory = RolloutDirectory(tmp_path)
    layout = PLANNED_FOR[planned_for]
    if layout is not None:
        publish_layout(directory, layout, OPTIONS)
    samples = agentic_samples(count, median, columns)
    write_planned(directory, samples)
    plan = make_plan(directory.index(0), LAYOUT, OPTIONS)
    directory.read(0, [0])  # imports and caches out of the way
    for rows in rows_by_rank(plan)[::4]:
        own = [samples[row] for row in rows]
        whole = bytes_read(lambda rows=rows: directory.read(0, rows))
        assert whole <= 1.1 * own_bytes(own, columns) + 64_000
        first_stage = bytes_read(lambda rows=rows: directory.read(0, rows, fields=()))
        assert first_stage <= 1.1 * own_bytes(own, 0) + 64_000

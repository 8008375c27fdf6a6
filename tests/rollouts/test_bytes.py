"""What 32 data-parallel ranks read of a planned batch: hardly more than their own rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.plan.handshake import (
    checked_plan,
    publish_layout,
    rows_by_rank,
    write_planned,
)
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


def stored_bytes(part: Path) -> int:
    """Encoded size of all columns of a part."""
    groups = [
        pq.read_metadata(part).row_group(i) for i in range(pq.read_metadata(part).num_row_groups)
    ]
    return sum(g.column(c).total_compressed_size for g in groups for c in range(g.num_columns))


@pytest.mark.parametrize(("count", "median", "columns"), [(256, 400, 0), (2048, 300, 2)])
def test_each_of_32_ranks_reads_its_rows(
    tmp_path: Path, count: int, median: int, columns: int
) -> None:
    directory = RolloutDirectory(tmp_path)
    publish_layout(directory, LAYOUT, OPTIONS)
    write_planned(directory, agentic_samples(count, median, columns))
    plan = checked_plan(directory.plan_json(0) or "", directory.index(0), LAYOUT, OPTIONS)
    for rank, rows in enumerate(rows_by_rank(plan)):
        part = tmp_path / "batch-00000000" / f"part-{rank:05d}.parquet"
        assert pq.read_metadata(part).num_rows == len(rows)
        own = stored_bytes(part)
        assert bytes_read(lambda rows=rows: directory.read(0, rows)) <= 1.1 * own + 64_000
        if columns:
            first_stage = bytes_read(lambda rows=rows: directory.read(0, rows, fields=()))
            assert first_stage <= 0.5 * own + 64_000

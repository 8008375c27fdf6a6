"""The demo's asynchronous arm on the real Megatron, and what its ledger says."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from examples.demo.__main__ import show_asynchronous  # noqa: E402
from examples.demo.asynchronous import Arm, compare  # noqa: E402
from examples.demo.training import TrainingFailed, read_json_lines  # noqa: E402
from tests.examples.launching import launch, untrained  # noqa: E402

pytestmark = pytest.mark.slow

NUM_BATCHES = 3


def test_no_trained_rollout_is_older_than_the_limit(tmp_path: Path) -> None:
    arm = Arm("asynchronous", 1, tmp_path / "arm", NUM_BATCHES, least_seconds=0.0)
    arm.folder.mkdir()
    generation = threading.Thread(target=arm.generation(seed=1, groups=4).run, daemon=True)
    generation.start()
    launch(1, untrained(arm.launch(1, tmp_path)))
    generation.join()

    rows = arm.ledger()
    assert [row.batch_id for row in rows] == list(range(NUM_BATCHES))
    assert rows[0].age == 0 and all(0 <= row.age <= 1 for row in rows)
    assert all(row.rollouts == row.trained_rollouts > 0 for row in rows)
    for before, row in zip(rows, rows[1:], strict=False):
        assert before.trained[0] <= before.trained[1] <= row.trained[0] <= row.trained[1]
        assert row.generated[1] <= row.trained[0]
    boundaries = read_json_lines(arm.folder / "boundaries.jsonl")
    assert [b["event"] for b in boundaries] == ["begin", "end"] * NUM_BATCHES

    turns = Arm("synchronous", 1, arm.folder, NUM_BATCHES, least_seconds=0.0)
    turns.wall_seconds, arm.wall_seconds = 10.0, 6.0
    show_asynchronous(tmp_path, [turns, arm])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["wall_ratio"] == 0.6 and summary["loop_ratio"] == 1.0
    assert summary["asynchronous"]["oldest"] == max(row.age for row in rows)
    assert len(summary["asynchronous"]["ledger"]) == NUM_BATCHES
    page = (tmp_path / "report.html").read_text()
    assert page.count("<tr>") == 1 + NUM_BATCHES
    assert len(re.findall("batch(?:es)? old; mean reward", page)) == 3
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")

    turns.limit = 0
    stale = [replace(row, age=1) for row in rows]
    torn = [replace(row, trained_rollouts=row.rollouts - 1) for row in rows]
    for wrong in (stale, torn, rows[1:]):
        with pytest.raises(TrainingFailed, match="synchronous: . of 3 batches were trained; too"):
            compare([turns, arm], [wrong, rows])

"""Rollouts in memory: the same contract as files, keys, notes, deletion."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import (
    RolloutDataError,
    RolloutDirectory,
    RolloutQueue,
    Sample,
    open_transport,
)
from megatron_dynbatch.rollouts.flow import (
    NoRoom,
    publish_progress,
    training_batch,
    wait_for_room,
)
from tests.rollouts.helpers import assert_same_samples, random_samples


def test_write_read_delete_and_finish() -> None:
    queue = RolloutQueue()
    samples = random_samples(20, seed=0)
    assert queue.state(0) == "absent"
    assert queue.write(samples, "plan", key="a") == 0
    assert queue.write(samples[:1], key="b") == 1
    assert queue.write(samples, key="a") == 0
    assert_same_samples(queue.read(0, [19, 3, 3]), [samples[19], samples[3], samples[3]])
    assert len(queue.index(0)) == 20 and queue.plan_json(0) == "plan"
    with pytest.raises(ValueError, match="no row 20; batch 0 has 20 rows"):
        queue.read(0, [20])
    queue.delete_before(1)
    with pytest.raises(RolloutDataError, match="batch 0 was deleted"):
        queue.state(0)
    assert queue.write(samples, key="a") == 0
    assert queue.finish() == 2
    assert [queue.state(1), queue.state(2), queue.state(7)] == ["present", "end", "end"]
    with pytest.raises(RolloutDataError, match="finished after 2 batches"):
        queue.write(samples)
    with pytest.raises(RolloutDataError, match="finished after 2 batches"):
        queue.finish()


def test_bad_samples_are_refused() -> None:
    queue = RolloutQueue(vocab_size=5)
    with pytest.raises(RolloutDataError, match="vocabulary size 5"):
        queue.write([Sample([7, 7], 1)])
    assert queue.state(0) == "absent"


def test_paths_name_transports(tmp_path: Path) -> None:
    directory = open_transport(tmp_path, vocab_size=3)
    assert isinstance(directory, RolloutDirectory) and directory.path == tmp_path
    queue = open_transport("queue:paths", vocab_size=5)
    assert queue is open_transport("queue:paths") and isinstance(queue, RolloutQueue)
    with pytest.raises(RolloutDataError):
        queue.write([Sample([7, 7], 1)])
    for path in ("queue:", "ray://host:6379", "ray:///run?jurnal=x"):
        with pytest.raises(ValueError, match="rollout path"):
            open_transport(path)


@pytest.mark.parametrize("max_ahead", [0, 2])
def test_generation_runs_ahead_only_so_far(
    max_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = RolloutQueue()
    assert training_batch(queue) == 0
    for batch in range(max_ahead + 1):
        wait_for_room(queue, batch, max_ahead, timeout=0)
    with pytest.raises(NoRoom, match=f"stands at batch 0; batch {max_ahead + 1} may be"):
        wait_for_room(queue, max_ahead + 1, max_ahead, timeout=0.1)
    # Between two looks.
    monkeypatch.setattr("time.sleep", lambda seconds: publish_progress(queue, 1))
    wait_for_room(queue, max_ahead + 1, max_ahead, timeout=20)
    assert training_batch(queue) == 1
    queue.publish("progress", "x")
    with pytest.raises(RolloutDataError, match="progress note 'x'"):
        training_batch(queue)

"""Rollouts over a real, local Ray: the contract of files, few bytes, and a killed actor."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dynbatch.handshake import publish_layout, rows_by_rank, write_planned
from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, Sample, open_transport
from megatron_dynbatch.rollouts.content import content_of_samples
from megatron_dynbatch.steps import StepFeed
from tests.rollouts.helpers import assert_same_samples, random_samples

ray = pytest.importorskip("ray")
slow = pytest.mark.slow

from megatron_dynbatch.rollouts import ray_transport  # noqa: E402
from megatron_dynbatch.rollouts.ray_local import start_local_ray  # noqa: E402
from megatron_dynbatch.rollouts.ray_transport import RayRollouts, encode_part  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray of one CPU on this machine, as the examples start it."""
    start_local_ray(num_cpus=1, object_store_memory=2**28)
    yield
    ray.shutdown()


@pytest.fixture
def name() -> str:
    """A run of its own for each test."""
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the halves of parts that readers of this process fetched, in order."""
    sizes: list[int] = []
    read_part = ray_transport.read_part

    def counting(blobs: list[Any], *rest: Any) -> dict[int, Sample]:
        sizes.extend(blob.content.nbytes for blob in blobs)
        return read_part(blobs, *rest)

    monkeypatch.setattr(ray_transport, "read_part", counting)
    return sizes


def kill(rollouts: RayRollouts) -> None:
    """End the actor's process as the kernel would; Ray starts it anew."""
    pid = ray.get(rollouts._hub.__ray_call__.remote(lambda hub: os.getpid()))
    os.kill(pid, signal.SIGKILL)


@slow
def test_a_cluster_of_one_machine_listens_on_loopback_only() -> None:
    own = {child.pid for child in psutil.Process().children(recursive=True)}
    listening = [
        connection.laddr.ip
        for connection in psutil.net_connections(kind="inet")
        if connection.pid in own and connection.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_write_read_delete_and_finish(name: str) -> None:
    rollouts = open_transport(f"ray:///{name}")
    assert isinstance(rollouts, RayRollouts) and rollouts.state(0) == "absent"
    samples = random_samples(60, seed=0)
    assert rollouts.write(samples, "plan", parts=[[3, 2], [59]], key="a") == 0
    assert rollouts.write(samples[:1]) == 1
    assert rollouts.write(samples, key="a") == 0
    other = RayRollouts(name)  # another process would do the same
    assert_same_samples(other.read(0, [59, 3, 10, 3]), [samples[r] for r in (59, 3, 10, 3)])
    assert other.read(0, [3], fields=())[0].values is None
    assert len(other.index(0)) == 60 and other.plan_json(0) == "plan"
    assert other.content_stamp(0, verify=True) == content_of_samples(samples)
    assert other.source_id() == rollouts.source_id() != RayRollouts(f"{name}-2").source_id()
    rollouts.publish("layout", "x")
    assert other.published("layout") == "x" and other.published("progress") is None
    for call in (lambda: other.read(0, [60]), lambda: other.read(0, [0], fields=["logprobs"])):
        with pytest.raises(ValueError, match="no row 60|no optional field"):
            call()
    with pytest.raises(RolloutDataError, match="there is no batch 7"):
        other.index(7)
    other.delete_before(1)
    with pytest.raises(RolloutDataError, match="batch 0 was deleted"):
        rollouts.read(0, [3])
    assert rollouts.finish() == 2
    assert [rollouts.state(b) for b in (1, 2)] == ["present", "end"]
    with pytest.raises(RolloutDataError, match="finished after 2 batches"):
        rollouts.write(samples)


@slow
def test_the_feed_trains_from_ray(name: str) -> None:
    rollouts = RayRollouts(name)
    layout, options = ParallelLayout(), PlanOptions(max_tokens_per_gpu=12, rollouts_per_step=2)
    publish_layout(rollouts, layout, options)
    for batch in range(3):
        write_planned(rollouts, [Sample([9 * batch + n, 7, 7], 2) for n in range(3)])
    rollouts.finish()
    steps = StepFeed(RayRollouts(name), layout, options)
    seen = []
    while (step := steps.open_step()) is not None:
        seen.append([int(step.samples[row].tokens[0]) for row in step.step_plan.samples])
        steps.finish_step()
    assert seen == [[0, 1], [2], [9, 10], [11], [18, 19], [20]]


@slow
@pytest.mark.parametrize("planned_for", [32, 24, None])
def test_a_rank_fetches_its_own_rows_only(
    name: str, planned_for: int | None, fetched: list[int]
) -> None:
    """32 ranks, whether the batch was planned for them, for others, or not at all.

    What a rank fetches is the encoded size of its rows, and less without fields.
    """
    rollouts = RayRollouts(name)
    options = PlanOptions(max_tokens_per_gpu=256, rollouts_per_step=None)
    if planned_for is not None:
        publish_layout(rollouts, ParallelLayout(dp=planned_for), options)
    samples = random_samples(320, seed=4)
    write_planned(rollouts, samples)
    plan = make_plan(rollouts.index(0), ParallelLayout(dp=32), options)
    reader = RayRollouts(name)
    for rows in rows_by_rank(plan)[::3]:
        tokens, optional = (half.nbytes for half in encode_part([samples[r] for r in rows], rows))
        fetched.clear()
        assert_same_samples(reader.read(0, rows), [samples[row] for row in rows])
        assert 0 < sum(fetched) <= 1.1 * (tokens + optional)
        fetched.clear()
        reader.read(0, rows, fields=())  # a rank before the last pipeline stage
        assert 0 < sum(fetched) <= 1.1 * tokens
    cuts = ray.get(reader._hub.__ray_call__.remote(lambda hub: len(hub._cuts)))
    # Both reads of a rank shared one object, as its peers do.
    assert cuts == (0 if planned_for == 32 else 11)


@slow
def test_an_actor_with_a_journal_comes_back_with_all_batches(
    name: str, tmp_path: Path, fetched: list[int]
) -> None:
    path = f"ray:///{name}?journal={tmp_path / 'journal'}"
    rollouts: Any = open_transport(path)
    samples = random_samples(40, seed=1)
    rollouts.write(samples, "plan", parts=[[5, 4], [39]], key="a")
    rollouts.publish("progress", "0")
    assert_same_samples(rollouts.read(0, [5, 30]), [samples[5], samples[30]])
    kill(rollouts)
    assert rollouts.write(samples, key="a") == 0  # its writer did not learn the outcome
    assert rollouts.write(samples[:2], key="b") == 1
    known = rollouts.source_id()
    kill(rollouts)
    assert rollouts.source_id() == known == RolloutDirectory(tmp_path / "journal").source_id()
    assert rollouts.content_stamp(0) == content_of_samples(samples)
    assert rollouts.state(0) == rollouts.state(1) == "present"
    assert rollouts.published("progress") == "0" and rollouts.plan_json(0) == "plan"
    assert_same_samples(rollouts.read(0, [39, 5]), [samples[39], samples[5]])
    fetched.clear()
    RayRollouts(name).read(0, [5])
    of_a_part = sum(fetched)
    RayRollouts(name).read(0, range(40))
    assert 0 < of_a_part < (sum(fetched) - of_a_part) / 2  # the parts are there again
    kill(rollouts)
    assert rollouts.finish() == 2
    assert rollouts.state(2) == "end"


@slow
def test_an_actor_killed_while_batches_are_written_loses_and_doubles_none(
    name: str, tmp_path: Path
) -> None:
    rollouts: Any = open_transport(f"ray:///{name}?journal={tmp_path / 'journal'}")
    rollouts.state(0)
    killer = threading.Timer(0.3, kill, (rollouts,))
    killer.start()
    for number in range(40):
        rollouts.write([Sample([number, 7], 1)])
    killer.join()
    assert rollouts.finish() == 40
    found = [int(rollouts.read(b, [0])[0].tokens[0]) for b in range(40)]
    assert found == list(range(40))


@slow
def test_training_goes_on_over_a_killed_actor(name: str, tmp_path: Path) -> None:
    """Each rollout is trained once, though the actor dies before every second step."""
    rollouts: Any = open_transport(f"ray:///{name}?journal={tmp_path / 'journal'}")
    for batch in range(4):
        rollouts.write([Sample([10 * batch + n, 7], 1) for n in range(4)])
    rollouts.finish()
    options = PlanOptions(max_tokens_per_gpu=12, rollouts_per_step=3, leftover="carry")
    steps = StepFeed(rollouts, ParallelLayout(), options)
    seen: list[int] = []
    while (step := steps.open_step()) is not None:
        seen += [int(step.samples[row].tokens[0]) for row in step.step_plan.samples]
        steps.finish_step()
        if len(seen) % 2:
            kill(rollouts)
    assert seen == [10 * batch + n for batch in range(4) for n in range(4)]


@slow
def test_an_actor_without_a_journal_refuses_to_go_on(name: str) -> None:
    rollouts = RayRollouts(name)
    rollouts.write(random_samples(4, seed=0))
    kill(rollouts)
    with pytest.raises(RolloutDataError, match="started again without its batches.*journal"):
        rollouts.state(0)
    with pytest.raises(RolloutDataError, match="started again without its batches"):
        rollouts.write(random_samples(4, seed=0))

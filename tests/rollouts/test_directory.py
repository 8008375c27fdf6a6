"""Batches in a directory: atomic, numbered without gaps or doubles, closed once."""

import json
import multiprocessing
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, RolloutSource, Sample
from tests.rollouts.helpers import assert_same_samples, golden_samples, random_samples

spawn = multiprocessing.get_context("spawn")  # pyarrow has threads, so no fork


def tagged(writer: int, number: int) -> list[Sample]:
    return [Sample([writer, number, 7], 1)]


def visible_names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path))


def test_write_read_and_finish(tmp_path: Path) -> None:
    source: RolloutSource
    directory = source = RolloutDirectory(tmp_path / "new" / "run")
    samples = random_samples(40, seed=0)
    assert directory.write(golden_samples()) == 0
    assert directory.write(samples, plan_json='{"M": 3}') == 1
    assert directory.finish() == 2
    source = RolloutDirectory(tmp_path / "new" / "run")
    assert [source.state(b) for b in range(4)] == ["present", "present", "end", "end"]
    assert source.index(0).mask_sums.tolist() == [3, 1, 0, 2]
    assert_same_samples(source.read(1, [39, 0, 39]), [samples[39], samples[0], samples[39]])
    assert source.read(0, [0], fields=())[0].values is None
    assert source.plan_json(0) is None and source.plan_json(1) == '{"M": 3}'
    assert visible_names(directory.path) == [
        "batch-00000000", "batch-00000001", "batch-00000002", "dynbatch.json",
    ]  # fmt: skip


def test_states_of_a_run_that_goes_on(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "run")
    assert directory.state(0) == "absent"  # no directory yet
    (tmp_path / "run").mkdir()
    assert directory.state(0) == "absent"  # an empty one
    directory.write(golden_samples())
    assert [directory.state(b) for b in (0, 1, 5)] == ["present", "absent", "absent"]


def test_a_finished_run_takes_nothing_more(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path)
    directory.write(golden_samples())
    directory.finish()
    with pytest.raises(RolloutDataError, match="the run is finished after 1 batch;"):
        directory.write(golden_samples())
    with pytest.raises(RolloutDataError, match="the run is finished after 1 batch;"):
        RolloutDirectory(tmp_path).finish()
    assert visible_names(tmp_path) == ["batch-00000000", "batch-00000001", "dynbatch.json"]


def test_a_run_without_batches_can_end(tmp_path: Path) -> None:
    RolloutDirectory(tmp_path).finish()
    assert RolloutDirectory(tmp_path).state(0) == "end"


def test_rejected_samples_leave_nothing(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "run", vocab_size=20)
    for samples in ([], [Sample([], 0)], golden_samples()):
        with pytest.raises(RolloutDataError):
            directory.write(samples)
    assert not directory.path.exists()


@pytest.mark.parametrize("content", ["a file", {"x.txt": "hi"}, {"config": {}, "batch-1": {}}])
def test_not_a_rollout_directory(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "other"
    if isinstance(content, str):
        path.write_text(content)
    else:
        path.mkdir()
        for name in content:
            (path / name).write_text("")
    directory = RolloutDirectory(path)
    actions = (
        lambda: directory.state(0),
        lambda: directory.index(0),
        lambda: directory.write(golden_samples()),
        lambda: directory.finish(),
    )
    for action in actions:
        with pytest.raises(RolloutDataError, match="not a rollout directory") as caught:
            action()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('{"format": "megatron-dynbatch rollouts", "version": 1}', "has format version 1"),
        ('{"format": "else", "version": 3}', "not a rollout directory"),
        ("[]", "not a rollout directory"),
        ("{", "not valid JSON"),
    ],
)
def test_wrong_markers(tmp_path: Path, marker: str, message: str) -> None:
    (tmp_path / "dynbatch.json").write_text(marker)
    with pytest.raises(RolloutDataError, match=message):
        RolloutDirectory(tmp_path).state(0)


def test_marker_of_this_version(tmp_path: Path) -> None:
    RolloutDirectory(tmp_path).write(golden_samples())
    marker = json.loads((tmp_path / "dynbatch.json").read_text())
    assert marker.pop("id") == RolloutDirectory(tmp_path).source_id() != ""
    assert marker == {"format": "megatron-dynbatch rollouts", "version": 3}


def test_batch_ids_stay_inside_the_directory(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path)
    with pytest.raises(ValueError, match="batch id -1 is negative"):
        directory.state(-1)
    with pytest.raises(RolloutDataError, match="batch id '../../x' is no integer"):
        directory.index("../../x")  # type: ignore[arg-type]


def test_an_absent_batch_is_an_error_after_a_bounded_time(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path, open_timeout=0.05)
    with pytest.raises(RolloutDataError, match="no batch is there yet"):
        directory.index(0)
    directory.write(golden_samples())
    for read in (lambda: directory.index(3), lambda: directory.plan_json(3)):
        with pytest.raises(RolloutDataError, match="batch-00000003.* is not there, looked for"):
            read()


def test_a_directory_that_shows_before_its_file(tmp_path: Path) -> None:
    """A shared file system may show a batch, and the marker, late: readers look again."""
    RolloutDirectory(tmp_path).write(golden_samples(), plan_json="{}")
    samples_file = tmp_path / "batch-00000000" / "index.parquet"
    files = [(f, f.read_bytes()) for f in (samples_file, tmp_path / "dynbatch.json")]
    for file, _ in files:
        file.unlink()

    def show() -> None:
        for file, content in files:
            file.with_name(".late").write_bytes(content)
            file.with_name(".late").rename(file)

    timer = threading.Timer(0.3, show)
    timer.start()
    try:
        assert len(RolloutDirectory(tmp_path).index(0)) == 4
    finally:
        timer.join()
    samples_file.unlink()
    assert RolloutDirectory(tmp_path).state(0) == "absent"  # state only looks, the caller waits
    timer = threading.Timer(0.3, show)
    timer.start()
    try:
        assert RolloutDirectory(tmp_path).plan_json(0) == "{}"
    finally:
        timer.join()
    (tmp_path / "dynbatch.json").unlink()
    with pytest.raises(RolloutDataError, match="holds 'batch-00000000' but no dynbatch.json"):
        RolloutDirectory(tmp_path, open_timeout=0.05).state(0)


def test_a_damaged_batch_names_its_file(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path)
    directory.write(golden_samples(), plan_json="{}")
    batch = tmp_path / "batch-00000000"
    content = (batch / "index.parquet").read_bytes()
    (batch / "index.parquet").write_bytes(content[:-20])
    (batch / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RolloutDataError, match="batch-00000000/index.parquet: cannot be read"):
        directory.index(0)
    (batch / "index.parquet").write_bytes(content)
    part = (batch / "part-00000.parquet").read_bytes()
    (batch / "part-00000.parquet").write_bytes(part[:-20])
    with pytest.raises(RolloutDataError, match="batch-00000000/part-00000.parquet: cannot be read"):
        directory.read(0, [0])
    with pytest.raises(RolloutDataError, match="batch-00000000/plan.json: not UTF-8"):
        directory.plan_json(0)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path)
    directory.write(golden_samples())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(OSError):
            directory.write(random_samples(200, seed=0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert visible_names(tmp_path) == ["batch-00000000", "dynbatch.json"]
    assert directory.write(golden_samples()) == 1


def _write_and_die(path: Path) -> None:
    import megatron_dynbatch.rollouts.batch_writer as module

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    module.sync = die  # type: ignore[assignment]
    RolloutDirectory(path).write(golden_samples())


def test_a_writer_that_dies_leaves_no_batch(tmp_path: Path) -> None:
    RolloutDirectory(tmp_path).write(golden_samples())
    writer = spawn.Process(target=_write_and_die, args=(tmp_path,))
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    hidden = [name for name in visible_names(tmp_path) if name.startswith(".tmp-")]
    assert len(hidden) == 1  # it did die in the middle
    directory = RolloutDirectory(tmp_path)
    assert directory.state(1) == "absent"
    assert directory.write(golden_samples()) == 1
    assert visible_names(tmp_path) == ["batch-00000000", "batch-00000001", "dynbatch.json"]


def _write_tagged(path: Path, writer: int, count: int) -> None:
    directory = RolloutDirectory(path)
    for number in range(count):
        directory.write(tagged(writer, number))


def test_several_writers_never_share_a_number(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writers = [spawn.Process(target=_write_tagged, args=(path, w, 20)) for w in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 3
    directory = RolloutDirectory(path)
    assert directory.finish() == 60
    found = [directory.read(b, [0])[0].tokens[:2].tolist() for b in range(60)]
    assert sorted(found) == [[w, n] for w in range(3) for n in range(20)]
    for w in range(3):  # the batches of one writer keep their order
        assert [n for writer, n in found if writer == w] == list(range(20))


def test_writers_racing_with_the_end_lose_no_batch(tmp_path: Path) -> None:
    """What a writer was told is written lies before the end; everything else was refused."""
    for attempt in range(10):
        directory = RolloutDirectory(tmp_path / str(attempt))
        written: list[int] = []
        barrier = threading.Barrier(4)

        def write_until_refused(
            directory: RolloutDirectory = directory,
            written: list[int] = written,
            barrier: threading.Barrier = barrier,
        ) -> None:
            barrier.wait()
            try:
                while True:
                    written.append(directory.write(golden_samples()))
            except RolloutDataError:
                pass

        threads = [threading.Thread(target=write_until_refused) for _ in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait()
        num_batches = directory.finish()
        for thread in threads:
            thread.join()
        assert sorted(written) == list(range(num_batches))
        assert directory.state(num_batches) == "end"


def test_a_marker_made_between_two_looks_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another_writer_was_first(path: Path) -> list[str]:
        monkeypatch.undo()
        RolloutDirectory(tmp_path).write(golden_samples())
        return os.listdir(path)

    directory = RolloutDirectory(tmp_path)
    monkeypatch.setattr("megatron_dynbatch.rollouts.marker.os.listdir", another_writer_was_first)
    assert directory.finish() == 1


def test_readable_by_others_as_the_umask_says(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        RolloutDirectory(tmp_path / "run").write(golden_samples())
    finally:
        os.umask(umask)
    batch = tmp_path / "run" / "batch-00000000"
    assert batch.stat().st_mode & 0o777 == 0o755
    assert (batch / "index.parquet").stat().st_mode & 0o777 == 0o644


def test_a_second_batch_of_a_key_is_the_first(tmp_path: Path) -> None:
    """A writer that does not know whether its write succeeded repeats it."""
    assert RolloutDirectory(tmp_path).write(tagged(0, 0), key="a") == 0
    directory = RolloutDirectory(tmp_path)
    assert directory.write(tagged(0, 1)) == 1
    assert directory.write(tagged(0, 0), key="a") == 0
    assert directory.write(tagged(0, 2), key="b") == 2
    assert RolloutDirectory(tmp_path).write(tagged(0, 2), key="b") == 2
    directory.delete_before(2)
    assert RolloutDirectory(tmp_path).write(tagged(0, 0), key="a") == 0  # trained and deleted
    assert directory.finish() == 3
    with pytest.raises(ValueError, match="key of a batch is empty"):
        directory.write(tagged(0, 0), key="")


def test_writers_of_one_key_at_once_write_one_batch(tmp_path: Path) -> None:
    for attempt in range(10):
        path = tmp_path / str(attempt)
        RolloutDirectory(path).publish("note", "")
        barrier = threading.Barrier(4)
        written: list[int] = []

        def write(
            path: Path = path,
            barrier: threading.Barrier = barrier,
            written: list[int] = written,
        ) -> None:
            barrier.wait()
            written.append(RolloutDirectory(path).write(golden_samples(), key="same"))

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert written == [0] * 4
        assert RolloutDirectory(path).finish() == 1


def test_deleted_batches_are_errors_and_keep_their_numbers(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path, open_timeout=0.05)
    for number in range(4):
        directory.write(tagged(0, number), plan_json="{}")
    directory.delete_before(3)
    directory.delete_before(3)
    reader = RolloutDirectory(tmp_path, open_timeout=0.05)
    for action in (reader.state, reader.index, lambda b: reader.read(b, [0]), reader.plan_json):
        with pytest.raises(RolloutDataError, match="batch-00000001 was deleted: a checkpoint"):
            action(1)
    assert reader.state(3) == "present" and reader.state(4) == "absent"
    assert visible_names(tmp_path / "batch-00000001") == ["DELETED"]
    directory.delete_before(4)
    assert reader.state(4) == "absent"
    assert directory.write(tagged(0, 4)) == 4
    assert directory.finish() == 5
    assert reader.state(5) == "end"


def test_notes(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "run")
    assert directory.published("layout") is None
    directory.publish("layout", "1")
    directory.publish("layout", "2")
    assert RolloutDirectory(tmp_path / "run").published("layout") == "2"
    assert directory.state(0) == "absent"
    with pytest.raises(ValueError, match="note name '../x'"):
        directory.publish("../x", "")


def test_clocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer whose clock is an hour behind: its files are older than what they follow."""
    directory = RolloutDirectory(tmp_path)
    now = [2e9, 1e9, 3e9]
    for number, seconds in enumerate(now):
        monkeypatch.setattr("time.time", lambda s=seconds: s)
        directory.write(tagged(0, number))
        for path in [tmp_path, *tmp_path.rglob("*")]:
            os.utime(path, (seconds, seconds))
    found = [directory.read(b, [0])[0].tokens[1] for b in range(3)]
    assert found == [0, 1, 2] and directory.state(3) == "absent"

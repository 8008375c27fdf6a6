"""A restored feed trains the rollouts of its checkpoint, or says which others it found."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_dynbatch.errors import DynbatchError, ResumeError
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, RolloutQueue, Sample
from megatron_dynbatch.rollouts.manifest import write_manifest
from megatron_dynbatch.steps import Cursor, Exchange, StepFeed
from megatron_dynbatch.steps.ledger import Ledger, imbalance, read_ledger

SIZES = (5, 4, 6)


def sample(number: int, row: int) -> Sample:
    return Sample([number, 7, 8], 2, rollout_id=row)


def write(path: Path, sizes: tuple[int, ...] = SIZES, first: int = 1) -> RolloutDirectory:
    """Rollouts numbered on from `first`; the shape does not depend on it."""
    source = RolloutDirectory(path, open_timeout=0.0)
    for size in sizes:
        source.write([sample(first + row, row) for row in range(size)])
        first += size
    source.finish()
    return source


def feed(source: Any, leftover: str = "partial", **options: Any) -> StepFeed:
    chosen = PlanOptions(max_tokens_per_gpu=12, rollouts_per_step=2, leftover=leftover)
    return StepFeed(source, ParallelLayout(), chosen, batch_timeout=0.2, **options)


def train(steps: StepFeed, limit: int = 100) -> list[list[int]]:
    """Numbers of the rollouts of each step."""
    seen: list[list[int]] = []
    while len(seen) < limit and (step := steps.open_step()) is not None:
        seen.append([int(step.samples[row].tokens[0]) for row in step.step_plan.samples])
        steps.finish_step()
    steps.close()
    return seen


def stopped(source: Any, steps: int, leftover: str = "partial") -> Cursor:
    """The cursor of a run after so many steps, as a checkpoint gives it back."""
    run = feed(source, leftover)
    train(run, steps)
    return Cursor.from_dict(run.cursor.to_dict())


def resumed(source: Any, cursor: Cursor, leftover: str = "partial", **options: Any) -> StepFeed:
    run = feed(source, leftover, **options)
    run.restore(cursor)
    return run


def replace_batch(path: Path, number: int, samples: list[Sample]) -> None:
    """Another batch of that number in its place, as whole as the first."""
    other = RolloutDirectory(path.parent / "other")
    for _ in range(number + 1):
        other.write(samples)
    name = f"batch-{number:08d}"
    shutil.rmtree(path / name)
    (path.parent / "other" / name).rename(path / name)


def test_a_cursor_knows_source_and_batches(tmp_path: Path) -> None:
    source = write(tmp_path / "r")
    stamps = [source.content_stamp(batch) for batch in range(3)]
    run = feed(source, "carry")
    known = []
    while run.open_step() is not None:
        run.finish_step()
        known.append((run.cursor.batch_id, run.cursor.step_index, run.cursor.stamps))
        assert run.cursor.source_id == source.source_id()
        assert run.cursor.source_name == str(source)
        assert Cursor.from_dict(run.cursor.to_dict()) == run.cursor
    run.close()
    # 5 rollouts are 2 + 2 and one that is carried; with it the second batch has 5 again.
    zero, one, two = ({batch: stamps[batch]} for batch in range(3))
    assert known == [
        (0, 1, zero), (1, 0, zero),
        (1, 1, zero | one), (2, 0, one),
        (2, 1, one | two), (2, 2, one | two), (3, 0, two),
        (4, 0, two),
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("leftover", ["partial", "carry"])
def test_another_directory_of_the_same_shape_is_refused(
    tmp_path: Path, steps: int, leftover: str
) -> None:
    source, other = write(tmp_path / "r"), write(tmp_path / "other", first=40)
    run = resumed(other, stopped(source, steps, leftover), leftover)
    with pytest.raises(ResumeError) as raised:
        run.open_step()
    for part in (source.source_id(), other.source_id(), str(source), str(other)):
        assert part in str(raised.value)
    assert "--rollouts-moved" in str(raised.value) and "--finetune" in str(raised.value)
    assert not (tmp_path / "other" / "notes").exists()
    run.close()
    # The flag is for the same batches only.
    moved = resumed(other, stopped(source, steps, leftover), leftover, rollouts_moved=True)
    with pytest.raises(ResumeError, match="rollout batch [01] is not the one that"):
        moved.open_step()
    moved.close()


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_same_batches_written_elsewhere_need_the_flag(
    tmp_path: Path, steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "r")
    whole = train(feed(source))
    again = write(tmp_path / "again")
    cursor = stopped(source, steps)
    with pytest.raises(ResumeError, match="has the id"):
        resumed(again, cursor).open_step()
    run = resumed(again, cursor, rollouts_moved=True)
    assert train(run) == whole[steps:]
    assert run.cursor.source_id == again.source_id()
    line = capsys.readouterr().out
    assert f"in the place of {source} (id {source.source_id()})" in line
    assert (
        f"the same as then: batches {list(cursor.stamps)}; could not be compared: batches []"
        in line
    )


def test_a_copied_and_a_moved_directory_and_appended_batches_need_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = RolloutDirectory(tmp_path / "r")
    source.write([sample(n, n) for n in range(1, 6)])
    cursor = stopped(source, 1)
    source.write([sample(n, n) for n in range(6, 8)])
    source.finish()
    whole = train(resumed(source, cursor))
    assert whole == [[3, 4], [5], [6, 7]]
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    (tmp_path / "r").rename(tmp_path / "moved")
    capsys.readouterr()
    for name in ("copy", "moved"):
        assert train(resumed(RolloutDirectory(tmp_path / name), cursor)) == whole
    assert "compared" not in capsys.readouterr().out


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(
    ("leftover", "steps", "changed"),
    [("partial", 1, 0), ("partial", 3, 0), ("partial", 4, 1), ("carry", 2, 0), ("carry", 3, 0)],
)
def test_a_batch_that_was_replaced_is_refused(
    tmp_path: Path, leftover: str, steps: int, changed: int, moved: bool
) -> None:
    """It is half trained, the last one trained, or samples are carried from it."""
    source = write(tmp_path / "r")
    cursor = stopped(source, steps, leftover)
    before, digest = source.content_stamp(changed), cursor.steps_digest
    replace_batch(tmp_path / "r", changed, [sample(90 + n, n) for n in range(SIZES[changed])])
    run = resumed(source, cursor, leftover, rollouts_moved=moved)
    with pytest.raises(ResumeError) as raised:
        run.open_step()
    run.close()
    now = source.content_stamp(changed)
    assert f"rollout batch {changed} is not the one" in str(raised.value)
    assert before in str(raised.value) and now in str(raised.value) and before != now
    # The steps are the same by batch and row: without the stamp nothing tells.
    forgetful = Cursor.from_dict({**cursor.to_dict(), "stamps": {}})
    run = resumed(source, forgetful, leftover)
    run.open_step()
    assert digest in (None, run.cursor.steps_digest)
    run.close()


def test_parts_exchanged_below_their_index_are_noticed_at_resume(tmp_path: Path) -> None:
    """Whoever does it mends the manifest too, so that the batch looks whole."""
    source = write(tmp_path / "r")
    cursor = stopped(source, 1)
    write(tmp_path / "other", first=40)
    name = "batch-00000000/part-00000.parquet"
    shutil.copy(tmp_path / "other" / name, tmp_path / "r" / name)
    write_manifest((tmp_path / "r" / name).parent, source.stamp(0))
    with pytest.raises(RolloutDataError, match="parts were changed after it was written"):
        resumed(source, cursor).open_step()


def test_a_batch_that_changes_while_samples_are_carried_from_it_is_refused(tmp_path: Path) -> None:
    source = RolloutDirectory(tmp_path / "r")
    source.write([sample(n, n) for n in range(1, 6)])
    run = feed(source, "carry")
    for _ in range(2):
        run.open_step()
        run.finish_step()
    replace_batch(tmp_path / "r", 0, [sample(90 + n, n) for n in range(1, 6)])
    source.write([sample(n, n) for n in range(6, 8)])
    with pytest.raises(ResumeError, match="rollout batch 0 is not the one"):
        run.open_step()
    run.close()


def test_the_same_batch_in_its_own_place_is_no_change(tmp_path: Path) -> None:
    source = write(tmp_path / "r")
    whole, cursor = train(feed(source)), stopped(source, 1)
    replace_batch(tmp_path / "r", 0, [sample(n, n - 1) for n in range(1, 6)])
    assert train(resumed(source, cursor)) == whole[1:]


def test_a_deleted_batch_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "r")
    whole, cursor = train(feed(source)), stopped(source, 3)
    assert list(cursor.stamps) == [0]
    source.delete_before(1)
    assert train(resumed(source, cursor)) == whole[3:]
    assert "compared" not in capsys.readouterr().out
    again = write(tmp_path / "again")
    again.delete_before(1)
    assert train(resumed(again, cursor, rollouts_moved=True)) == whole[3:]
    assert "could not be compared: batches [0]" in capsys.readouterr().out


def test_a_directory_that_comes_later_is_compared_when_it_is_there(tmp_path: Path) -> None:
    source = write(tmp_path / "r")
    cursor = stopped(source, 1)
    for options, message in (({}, "has the id"), ({"rollouts_moved": True}, "batch 0 is not")):
        later = tmp_path / f"later{len(options)}"
        run = resumed(RolloutDirectory(later), cursor, **options)
        run.batch_timeout = 60
        run.on_batch_needed = lambda cursor, later=later: write(later, first=40) and None
        with pytest.raises(ResumeError, match=message):
            run.open_step()
        run.close()


def test_a_checkpoint_of_before_is_not_compared_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "r")
    whole, values = train(feed(source)), stopped(source, 1).to_dict()
    for name in ("source_id", "source_name", "stamps"):
        del values[name]
    run = resumed(source, Cursor.from_dict(values))
    assert train(run) == whole[1:] and run.cursor.source_id == source.source_id()
    said = [line for line in capsys.readouterr().out.splitlines() if "does not say" in line]
    assert len(said) == 1
    train(resumed(source, Cursor()))
    assert "does not say" not in capsys.readouterr().out


def test_a_directory_without_id_is_compared_by_its_batches(tmp_path: Path) -> None:
    source = write(tmp_path / "r")
    text = '{"format": "megatron-dynbatch rollouts", "version": 3}'
    (tmp_path / "r" / "dynbatch.json").write_text(text)
    source = RolloutDirectory(tmp_path / "r")
    whole, cursor = train(feed(source)), stopped(source, 1)
    assert cursor.source_id == "" and cursor.stamps
    assert train(resumed(source, cursor)) == whole[1:]
    replace_batch(tmp_path / "r", 0, [sample(90 + n, n) for n in range(5)])
    with pytest.raises(ResumeError, match="batch 0 is not the one"):
        resumed(source, cursor).open_step()


def test_stamps_of_another_kind_are_not_compared(tmp_path: Path) -> None:
    source = write(tmp_path / "r")
    cursor = stopped(source, 1)
    other = Cursor.from_dict({**cursor.to_dict(), "stamps": {"0": "files:abc"}})
    run = resumed(source, other)
    train(run, 1)
    assert run.cursor.stamps == cursor.stamps


def test_a_queue_has_its_name_and_stamps(tmp_path: Path) -> None:
    queue, other = RolloutQueue("a"), RolloutQueue("a")
    queue.write([sample(n, n) for n in range(5)])
    other.write([sample(n + 1, n) for n in range(5)])
    cursor = stopped(queue, 1)
    assert cursor.source_id == "queue:a"
    with pytest.raises(ResumeError, match="batch 0 is not the one"):
        resumed(other, cursor).open_step()


@pytest.fixture
def on_two_ranks() -> Iterator[Callable[..., list[str]]]:
    """The errors of both ranks of a resumed run."""

    def run(sources: list[RolloutDirectory], cursor: Cursor) -> list[str]:
        store, errors = dist.HashStore(), ["", ""]

        def one(rank: int) -> None:
            exchange = Exchange(store, rank, 2, timeout=60)
            steps = feed(sources[rank], exchange=exchange)
            steps.restore(cursor)
            try:
                steps.open_step()
            except DynbatchError as error:
                errors[rank] = f"{type(error).__name__}: {error}"
            steps.close()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    yield run


def test_all_ranks_end_before_the_first_step(
    tmp_path: Path, on_two_ranks: Callable[..., list[str]]
) -> None:
    cursor = stopped(write(tmp_path / "r"), 1)
    path = tmp_path / "other"
    write(path, first=40)
    first, second = on_two_ranks([RolloutDirectory(path), RolloutDirectory(path)], cursor)
    assert first.startswith("ResumeError: the checkpoint was trained on")
    assert second == f"RankFailure: rank 0: {first}"


def test_a_stale_copy_on_one_machine_is_noticed_where_contents_are_equal(
    tmp_path: Path, on_two_ranks: Callable[..., list[str]]
) -> None:
    cursor = stopped(write(tmp_path / "r"), 1)
    shutil.copytree(tmp_path / "r", tmp_path / "stale")
    replace_batch(tmp_path / "r", 0, [sample(n, n - 1) for n in range(1, 6)])
    sources = [RolloutDirectory(tmp_path / name) for name in ("r", "stale")]
    assert sources[0].content_stamp(0) == sources[1].content_stamp(0)
    for error in on_two_ranks(sources, cursor):
        assert "ranks disagree: rollout files is" in error


def test_the_ledger_names_source_and_batch(tmp_path: Path) -> None:
    source, path = write(tmp_path / "r"), tmp_path / "ledger"
    train(feed(source, ledger=Ledger(path)))
    entries = read_ledger(path)
    assert {entry.source_id for entry in entries} == {source.source_id()}
    assert [e.stamp for e in entries] == [source.content_stamp(e.batch_id) for e in entries]
    assert imbalance(entries, source, len(SIZES)) == []
    other = write(tmp_path / "other", first=40)
    assert imbalance(entries, other, len(SIZES)) == [
        f"rollout batch {n} in {other} is not the one that was trained: it has the stamp "
        f"{other.content_stamp(n)}, then it was {source.content_stamp(n)}"
        for n in range(3)
    ]


def test_a_cursor_keeps_what_samples_are_carried_from_however_old() -> None:
    cursor = Cursor(batch_id=2, stamps={0: "rows:a", 1: "rows:b", 2: "rows:c"})
    assert cursor.after_batch(((0, 3), (2, 0)), 0).stamps == {0: "rows:a", 2: "rows:c"}
    assert cursor.after_batch((), 0).stamps == {2: "rows:c"}

"""What the version before wrote is read, trained on, and gone on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dynbatch.handshake import read_layout
from megatron_dynbatch.plan import ParallelLayout, Plan
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, RolloutQueue
from megatron_dynbatch.steps import Cursor, StepFeed
from megatron_dynbatch.steps.ledger import Ledger, read_ledger
from tests.compatibility.make import LAYOUT, OPTIONS, TRAIN, train_job
from tests.pool import run_ranks
from tests.rollouts.helpers import assert_same_samples, random_samples

BEFORE = Path(__file__).parent / "before"
SAMPLES = {1: random_samples(9, seed=1), 2: random_samples(7, seed=2)}


def values_of(name: str) -> Any:
    return json.loads((BEFORE / name).read_text())


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return shutil.copytree(BEFORE, tmp_path / "before")


def test_a_directory_is_read(before: Path) -> None:
    directory = RolloutDirectory(before / "rollouts")
    with pytest.raises(RolloutDataError, match="was deleted: a checkpoint"):
        directory.state(0)
    assert [directory.state(n) for n in (1, 2, 3)] == ["present", "present", "end"]
    for batch, samples in SAMPLES.items():
        assert_same_samples(directory.read(batch, range(len(samples))), samples)
        few = [3, 0, 6]
        assert_same_samples(directory.read(batch, few), [samples[row] for row in few])
        for name in ("total_length", "mask_sum"):
            expected = [getattr(sample, name) for sample in samples]
            assert getattr(directory.index(batch), f"{name}s").tolist() == expected
    assert directory.num_batches_if_finished() == 3
    assert read_layout(directory) == (ParallelLayout(), OPTIONS)  # the own loop's
    with pytest.raises(RolloutDataError, match="finished after 3 batches"):
        directory.write(SAMPLES[1])


def test_its_batches_have_the_stamps_of_their_content(before: Path) -> None:
    directory, queue = RolloutDirectory(before / "rollouts"), RolloutQueue()
    assert directory.source_id() == ""
    for batch, samples in SAMPLES.items():
        queue.write(samples)
        assert directory.content_stamp(batch) == queue.content_stamp(batch - 1)
        assert directory.content_stamp(batch, verify=True) == queue.content_stamp(batch - 1)
        assert directory.stamp(batch)


def test_an_open_directory_is_gone_on_with(before: Path) -> None:
    shutil.rmtree(before / "rollouts" / "batch-00000003")
    directory = RolloutDirectory(before / "rollouts")
    assert directory.write(SAMPLES[1], key="epoch-1") == 2  # its key is there
    assert directory.write(SAMPLES[1]) == 3
    assert directory.content_stamp(3) == directory.content_stamp(1)
    assert directory.finish() == 4 and directory.source_id() == ""


@pytest.mark.parametrize("name", ["data-parallel", "pipeline"])
def test_plans_are_read(name: str) -> None:
    text = (BEFORE / "plans" / f"{name}.json").read_text()
    plan = Plan.from_json(text)
    plan.check()
    assert plan.fingerprint == (BEFORE / "plans" / f"{name}.fingerprint").read_text().strip()
    assert plan.to_json() == text.strip()
    index = RolloutDirectory(BEFORE / "rollouts").index(1)
    np.testing.assert_array_equal(plan.index.total_lengths, index.total_lengths)


def test_a_plan_beside_its_batch_is_used(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feed = StepFeed(RolloutDirectory(before / "rollouts"), LAYOUT, OPTIONS)
    feed.restore(Cursor(batch_id=1, consumed_rollouts=2))
    assert feed.open_step() is not None
    feed.close()
    assert "rollout batch 1 " not in capsys.readouterr().out


@pytest.mark.parametrize("number", range(len(values_of("cursors.json"))))
def test_a_run_goes_on_at_any_cursor(
    before: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = values_of("cursors.json")
    assert "stamps" not in saved[number]
    cursor = Cursor.from_dict(saved[number])
    path = before / "again.jsonl"
    feed = StepFeed(
        RolloutDirectory(before / "rollouts"), ParallelLayout(), OPTIONS, ledger=Ledger(path)
    )
    feed.restore(cursor)
    if cursor.first_batch == 0:
        with pytest.raises(RolloutDataError, match="was deleted: a checkpoint"):
            feed.open_step()
        return
    while feed.open_step() is not None:
        feed.finish_step()
        known = feed.cursor.to_dict()
        assert known["stamps"]
        place = ("batch_id", "step_index")
        then = next(c for c in saved if [c[n] for n in place] == [known[n] for n in place])
        for name in then:
            assert known[name] == (
                tuple(map(tuple, then[name])) if name == "carried" else then[name]
            )
    feed.close()
    assert capsys.readouterr().out.count("does not say on which rollouts") == 1
    # The ledger says the same, from there on.
    then = [
        e
        for e in read_ledger(BEFORE / "ledger.jsonl")
        if e.place >= (cursor.batch_id, cursor.step_index)
    ]
    now = read_ledger(path) if path.exists() else []
    assert [(e.place, e.consumed, e.dropped, e.trained_tokens) for e in now] == [
        (e.place, e.consumed, e.dropped, e.trained_tokens) for e in then
    ]


def test_a_ledger_is_read_and_gone_on_with(before: Path) -> None:
    path = before / "ledger.jsonl"
    entries = read_ledger(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e.batch_id, e.step_index) for e in entries] == [
        (line["batch_id"], line["step_index"]) for line in lines
    ]
    assert {(e.source_id, e.stamp) for e in entries} == {("", "")}
    last = entries[-1]
    Ledger(path).append(last)
    assert read_ledger(path) == entries


def close(rows: list[dict[str, float]]) -> list[Any]:
    """What Megatron logs, but for the last digits of another processor."""
    return [pytest.approx(row, rel=1e-5) for row in rows]


def test_a_checkpoint_inside_a_batch_is_gone_on_with(before: Path) -> None:
    folder = before / "training"
    whole = values_of("training/whole.json")
    again = run_ranks(1, train_job, str(folder), TRAIN, True)[0]
    assert again == close(whole)
    argv = [*TRAIN, "--load", "checkpoint", "--save", "checkpoint"]
    rest = run_ranks(1, train_job, str(folder), argv, True, None)[0]
    # The checkpoint was made on another processor, whose float32 sums differ in the last digits.
    assert rest == close(again[4:])


def test_a_checkpoint_without_cursor_is_refused_or_begun_anew(before: Path) -> None:
    folder = str(before / "training")
    argv = [*TRAIN, "--load", "without-cursor"]
    with pytest.raises(
        AssertionError, match="ResumeError: the checkpoint counts 4 consumed samples"
    ):
        run_ranks(1, train_job, folder, argv, True)
    rows = run_ranks(1, train_job, folder, [*argv, "--finetune"], True, None)[0]
    assert [row["consumed"] for row in rows] == [4, 6, 10, 14, 16]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5]
    # Weights were loaded: the first loss is not that of fresh ones.
    assert rows[0]["lm loss"] != values_of("training/whole.json")[0]["lm loss"]
    stock = ["--train-iters", "2", "--load", "without-cursor", "--override-opt-param-scheduler"]
    assert [row["iteration"] for row in run_ranks(1, train_job, folder, stock, True, None)[0]] == [
        2
    ]

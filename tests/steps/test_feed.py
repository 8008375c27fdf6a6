"""The feed in one process: order of rollouts, leftovers across batches, resume, and its errors."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dynbatch.handshake import publish_layout, read_layout, write_planned
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from megatron_dynbatch.steps import BatchTimeout, Cursor, LoadedBatch, Staleness, StepFeed
from megatron_dynbatch.steps.cursor import STEP_OPTIONS

LAYOUT = ParallelLayout()


def sample(number: int, rollout_id: int | None = None, *, trained: bool = True) -> Sample:
    """A sample whose first token is its number."""
    tokens = np.array([number, 7, 7], dtype=np.int64)
    return Sample(tokens, loss_mask=[int(trained)] * 2, rollout_id=rollout_id)


def directory(path: Path, sizes: list[int], *, end: bool = True) -> RolloutDirectory:
    """Batches of rollouts, numbered on through all batches from 1; even ones have two samples."""
    rollouts = RolloutDirectory(path)
    number = 0
    for size in sizes:
        fan_out = [i for i in range(size) for _ in range(1 + (number + i) % 2)]
        rollouts.write([sample(number + i + 1, i) for i in fan_out])
        number += size
    if end:
        rollouts.finish()
    return rollouts


def feed(source: RolloutDirectory, **options: object) -> StepFeed:
    chosen = PlanOptions(**{"max_tokens_per_gpu": 12, **options})  # type: ignore[arg-type]
    return StepFeed(source, LAYOUT, chosen, batch_timeout=0.3)


def trained_numbers(steps: StepFeed, limit: int = 100) -> list[list[int]]:
    """First tokens of the rollouts of each step, until the end or ``limit`` steps."""
    seen: list[list[int]] = []
    while len(seen) < limit and (step := steps.open_step()) is not None:
        rows = step.step_plan.samples
        seen.append(list(dict.fromkeys(int(step.samples[row].tokens[0]) for row in rows)))
        assert steps.finish_step() == len(seen[-1])
    return seen


def test_partial_trains_a_smaller_last_step_of_each_batch(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [7, 2]), rollouts_per_step=3)
    assert trained_numbers(steps) == [[1, 2, 3], [4, 5, 6], [7], [8, 9]]
    assert steps.cursor.consumed_rollouts == 9


def test_carry_puts_leftovers_first_in_the_next_batch_and_loses_none(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [7, 1, 3]), rollouts_per_step=3, leftover="carry")
    assert trained_numbers(steps) == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11]]


def test_a_batch_too_small_for_a_step_is_carried_whole(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [1, 1, 1, 1]), rollouts_per_step=3, leftover="carry")
    assert trained_numbers(steps) == [[1, 2, 3], [4]]


def test_carried_rollouts_weigh_as_much_as_new_ones(tmp_path: Path) -> None:
    """Steps of three; each batch has two rollouts, of five and of two trained tokens."""
    source = RolloutDirectory(tmp_path / "r")
    for _ in range(3):
        source.write(
            [
                Sample([1, 2, 3, 4], loss_mask=[1, 1, 0], rollout_id=0),
                Sample([1, 2, 3, 4], loss_mask=[1, 1, 1], rollout_id=0),
                Sample([5, 6, 7], loss_mask=[1, 0], rollout_id=1),
                Sample([5, 6, 7], loss_mask=[0, 1], rollout_id=1),
            ]
        )
    source.finish()
    steps = feed(source, rollouts_per_step=3, leftover="carry")
    # Batch 0 is carried whole; one rollout of batch 1 is carried on to batch 2.
    for _ in range(2):
        step = steps.open_step()
        assert step is not None and step.step_plan.loss_denominator == 3
        weights: dict[int, float] = {}
        for k in range(step.num_microbatches):
            batch = step.micro_batch(k)
            starts = batch.cu_seqlens_padded.tolist()
            for place, row in enumerate(batch.sample_rows):
                own = batch.token_weights[starts[place] : starts[place + 1]]
                trained = own[own != 0].tolist()
                short = int(step.samples[row].tokens[0]) == 5
                assert trained == [0.5] if short else trained in ([0.2] * 2, [0.2] * 3)
                rollout = int(step.plan.index.rollout_indices[row])
                weights[rollout] = weights.get(rollout, 0.0) + sum(trained)
        assert sorted(weights.values()) == pytest.approx([1.0] * 3)
        steps.finish_step()
    assert steps.open_step() is None


def test_drop_is_counted(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [10, 4]), rollouts_per_step=4, leftover="drop")
    assert trained_numbers(steps) == [[1, 2, 3, 4], [5, 6, 7, 8], [11, 12, 13, 14]]
    assert steps.cursor.dropped_rollouts == 2
    assert steps.cursor.consumed_rollouts == 12


@pytest.mark.parametrize("leftover", ["partial", "even", "carry"])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_resume_continues_at_the_next_rollout(tmp_path: Path, leftover: str, stop: int) -> None:
    source = directory(tmp_path / "r", [7, 5, 3])
    whole = trained_numbers(feed(source, rollouts_per_step=3, leftover=leftover))
    first = feed(source, rollouts_per_step=3, leftover=leftover)
    before = trained_numbers(first, limit=stop)
    saved = first.cursor.to_dict()
    second = feed(source, rollouts_per_step=3, leftover=leftover)
    second.restore(Cursor.from_dict(saved))
    assert before + trained_numbers(second) == whole


def test_resume_after_drop_starts_with_the_next_batch(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [10, 4])
    first = feed(source, rollouts_per_step=4, leftover="drop")
    trained_numbers(first, limit=2)
    second = feed(source, rollouts_per_step=4, leftover="drop")
    second.restore(first.cursor)
    assert trained_numbers(second) == [[11, 12, 13, 14]]


def test_another_step_size_inside_a_batch_is_refused(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [7])
    first = feed(source, rollouts_per_step=3)
    trained_numbers(first, limit=1)
    with pytest.raises(ValueError, match="rollouts_per_step=3, but now rollouts_per_step=2"):
        feed(source, rollouts_per_step=2).restore(first.cursor)


def test_step_options_are_plan_options() -> None:
    assert set(STEP_OPTIONS) <= set(PlanOptions(max_tokens_per_gpu=1).to_dict())


def test_a_step_without_trained_tokens_is_passed_over_and_counted(tmp_path: Path) -> None:
    source = RolloutDirectory(tmp_path / "r")
    source.write([sample(n, n, trained=n not in (3, 4)) for n in range(1, 7)])
    source.finish()
    steps = feed(source, rollouts_per_step=2)
    assert trained_numbers(steps) == [[1, 2], [5, 6]]
    assert steps.cursor.empty_steps == 1
    assert steps.cursor.consumed_rollouts == 6


def test_nothing_within_the_timeout_is_an_error_that_names_the_batch(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [2], end=False), rollouts_per_step=2)
    assert trained_numbers(steps, limit=1) == [[1, 2]]
    with pytest.raises(BatchTimeout, match="neither rollout batch 1 nor an END marker"):
        steps.open_step()


def test_a_run_without_rollouts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="closed without a single rollout"):
        feed(directory(tmp_path / "r", [])).open_step()


def test_the_policy_is_asked_only_when_the_batch_is_not_there(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [2], end=False)
    steps = feed(source, rollouts_per_step=2)
    asked: list[int] = []

    def write_next(cursor: Cursor) -> None:
        asked.append(cursor.batch_id)
        if cursor.batch_id == 3:
            source.finish()
        else:
            source.write([sample(10 * cursor.batch_id, 0)])

    steps.on_batch_needed = write_next
    assert trained_numbers(steps) == [[1, 2], [10], [20]]
    assert asked == [1, 2, 3]


def test_token_ids_outside_the_vocabulary_stop_before_training(tmp_path: Path) -> None:
    directory(tmp_path / "r", [3])
    with pytest.raises(ValueError, match="batch-00000000.*vocabulary size 7"):
        feed(RolloutDirectory(tmp_path / "r", vocab_size=7)).open_step()


def test_the_open_step_must_be_finished_first(tmp_path: Path) -> None:
    steps = feed(directory(tmp_path / "r", [3]))
    steps.open_step()
    with pytest.raises(RuntimeError, match="finish_step"):
        steps.open_step()


def test_micro_batches_end_at_the_planned_count(tmp_path: Path) -> None:
    step = feed(directory(tmp_path / "r", [3])).open_step()
    assert step is not None and step.num_microbatches == 1
    with pytest.raises(IndexError, match="has 1 micro-batch on DP rank 0; micro-batch 1"):
        step.micro_batch(1)


def test_the_rollout_sides_plan_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = RolloutDirectory(tmp_path / "r")
    publish_layout(source, LAYOUT, PlanOptions(max_tokens_per_gpu=12, rollouts_per_step=3))
    write_planned(source, [sample(n, n) for n in range(1, 6)])
    source.finish()
    monkeypatch.setattr("megatron_dynbatch.steps.announce.make_plan", None)
    steps = feed(source, rollouts_per_step=3)
    assert trained_numbers(steps) == [[1, 2, 3], [4, 5]]
    assert "plan" not in capsys.readouterr().out


def test_another_layout_is_planned_again_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = RolloutDirectory(tmp_path / "r")
    publish_layout(source, LAYOUT, PlanOptions(max_tokens_per_gpu=12, rollouts_per_step=2))
    for batch in range(3):
        write_planned(source, [sample(10 * batch + n, n) for n in range(1, 4)])
    source.write([sample(40, 1)])
    source.write([sample(50, 1)])
    source.finish()
    steps = feed(source, rollouts_per_step=3)
    assert trained_numbers(steps) == [[1, 2, 3], [11, 12, 13], [21, 22, 23], [40], [50]]
    assert capsys.readouterr().out.splitlines() == [
        "[megatron_dynbatch] rollout batch 0 has a plan that is not used: it was made for another "
        "options (rollouts_per_step=2); rank 0 plans it (said once)",
        "[megatron_dynbatch] rollout batch 3 came without a plan; rank 0 plans it (said once)",
    ]
    assert read_layout(source) == (LAYOUT, steps.options)  # of the trainer that is there now


def test_carried_leftovers_make_it_plan_again(tmp_path: Path) -> None:
    source = RolloutDirectory(tmp_path / "r")
    options = PlanOptions(max_tokens_per_gpu=12, rollouts_per_step=3, leftover="carry")
    publish_layout(source, LAYOUT, options)
    for batch in range(3):
        write_planned(source, [sample(10 * batch + n, n) for n in range(1, 5)])
    source.finish()
    steps = feed(source, rollouts_per_step=3, leftover="carry")
    assert trained_numbers(steps) == [[1, 2, 3], [4, 11, 12], [13, 14, 21], [22, 23, 24]]


def test_an_unreadable_plan_does_not_stop_training(tmp_path: Path) -> None:
    source = RolloutDirectory(tmp_path / "r")
    source.write([sample(1, 1)], plan_json="{}")
    source.finish()
    assert trained_numbers(feed(source)) == [[1]]


def test_other_steps_inside_a_batch_are_refused(tmp_path: Path) -> None:
    """The cap decides here which rollouts are dropped, hence what each step holds."""
    source = RolloutDirectory(tmp_path / "r")
    source.write([Sample([n] * (13 if n == 2 else 3), 1, rollout_id=n) for n in range(1, 6)])
    options: dict[str, object] = {"rollouts_per_step": 2, "oversize": "drop"}
    first = feed(source, **options)
    assert trained_numbers(first, limit=1) == [[1, 3]]
    second = feed(source, **options, max_tokens_per_gpu=16)
    second.restore(Cursor.from_dict(first.cursor.to_dict()))
    with pytest.raises(ValueError, match="stands at step 1 .* now other rollouts form its steps"):
        second.open_step()


def test_a_cursor_of_before_is_understood() -> None:
    values = Cursor(batch_id=2, step_index=1).to_dict()
    del values["steps_digest"], values["stale_rollouts"]
    assert Cursor.from_dict(values) == Cursor(batch_id=2, step_index=1)


def versioned(number: int, version: int | None) -> Sample:
    return Sample([number, 7, 7], 1, rollout_id=number, policy_version=version)


def stale_source(path: Path) -> RolloutDirectory:
    source = RolloutDirectory(path)
    source.write([versioned(1, 0)])
    source.write([versioned(2, 0), versioned(3, 1), versioned(3, 1), versioned(4, None)])
    source.write([versioned(5, 0), versioned(5, 0), versioned(6, 0)])
    source.write([versioned(7, 2), versioned(8, 1)])
    source.finish()
    return source


def test_rollouts_beyond_the_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    steps = feed(stale_source(tmp_path / "r"))
    steps = StepFeed(steps.source, LAYOUT, steps.options, staleness=Staleness(1))
    assert trained_numbers(steps) == [[1], [2, 3, 4], [7]]
    assert steps.cursor.stale_rollouts == 3 and steps.cursor.dropped_rollouts == 3
    assert steps.cursor.consumed_rollouts == 5


def test_stale_rollouts_can_be_trained_if_they_can_be_weighed(tmp_path: Path) -> None:
    source = stale_source(tmp_path / "r")
    options = PlanOptions(max_tokens_per_gpu=12)
    steps = StepFeed(source, LAYOUT, options, staleness=Staleness(1, "train"))
    with pytest.raises(ValueError, match="row 0 of rollout batch 2 has no rollout_log_probs"):
        trained_numbers(steps)
    weighed = RolloutDirectory(tmp_path / "w")
    for number in range(3):
        weighed.write([replace(versioned(number, 0), rollout_log_probs=np.zeros(1))])
    weighed.finish()
    steps = StepFeed(weighed, LAYOUT, options, staleness=Staleness(1, "train"))
    assert trained_numbers(steps) == [[0], [1], [2]]
    assert steps.cursor.stale_rollouts == 1 and steps.cursor.dropped_rollouts == 0


def test_a_rollout_is_as_old_as_its_oldest_sample_also_when_carried(tmp_path: Path) -> None:
    source = RolloutDirectory(tmp_path / "r")
    source.write([versioned(1, 0), replace(versioned(2, 0), rollout_id=1), versioned(3, 0)])
    source.write([versioned(4, 1)])
    source.write([versioned(5, 2), replace(versioned(6, 0), rollout_id=5)])
    source.finish()
    options = PlanOptions(max_tokens_per_gpu=12, rollouts_per_step=3, leftover="carry")
    steps = StepFeed(source, LAYOUT, options, staleness=Staleness(1))
    # Batches 0 and 1 make one step: rollouts 1, 3, 4.
    assert [sorted(numbers) for numbers in _numbers(steps)] == [[1, 2, 3, 4]]
    assert steps.cursor.stale_rollouts == 1


def _numbers(steps: StepFeed) -> list[list[int]]:
    seen = []
    while (step := steps.open_step()) is not None:
        seen.append([int(step.samples[row].tokens[0]) for row in step.step_plan.samples])
        steps.finish_step()
    return seen


@pytest.mark.parametrize("leftover", ["partial", "carry"])
def test_batches_go_only_when_no_resume_needs_them(tmp_path: Path, leftover: str) -> None:
    source = directory(tmp_path / "r", [4, 4, 4, 4])
    options = PlanOptions(max_tokens_per_gpu=12, rollouts_per_step=3, leftover=leftover)
    whole = trained_numbers(StepFeed(source, LAYOUT, options))
    steps = StepFeed(source, LAYOUT, options, keep_batches=0)
    trained_numbers(steps, limit=3)
    saved = steps.cursor
    assert source.state(0) == "present"
    steps.checkpoint_completed(saved)
    with pytest.raises(ValueError, match="batch-00000000 was deleted"):
        source.state(0)
    resumed = StepFeed(source, LAYOUT, options)
    resumed.restore(saved)
    assert trained_numbers(resumed) == whole[3:]
    early = StepFeed(source, LAYOUT, options, batch_timeout=0.3)
    with pytest.raises(ValueError, match="batch-00000000 was deleted: a checkpoint"):
        early.open_step()


def test_the_next_batch_is_ready_before_it_is_asked_for(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [2, 2])
    steps = feed(source)
    assert steps.open_step() is not None
    prefetch = steps._next._prefetch
    assert prefetch is not None and prefetch.batch_id == 1
    assert prefetch._done.wait(60)
    shutil.rmtree(tmp_path / "r")  # everything was read
    steps.finish_step()
    step = steps.open_step()
    assert step is not None and step.batch_id == 1 and step.wait_seconds > 0
    assert step.micro_batch(0).tokens.tolist()[0][::3] == [3, 4, 4]


def test_a_batch_is_packed_ahead_though_the_user_looks_at_it(tmp_path: Path) -> None:
    """`on_batch_opened` keeps what was packed if it hands back the samples that it was given."""
    steps = feed(directory(tmp_path / "r", [2, 2]))
    steps.on_batch_opened = lambda batch: batch.samples
    opened = steps._next.get(steps.cursor, None)
    ahead = opened.steps[0]
    steps._replace_samples(opened, opened.samples)
    assert opened.steps[0] is ahead
    steps._replace_samples(opened, dict(opened.samples))
    assert not opened.steps


def test_a_middle_pipeline_stage_reads_no_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = directory(tmp_path / "r", [3, 2])
    whole = feed(source, rollouts_per_step=2)
    unread = RolloutDirectory(tmp_path / "r")
    monkeypatch.setattr(unread, "read", None)
    middle = StepFeed(unread, LAYOUT, whole.options, lengths_only=True)
    while (step := whole.open_step()) is not None:
        lengths = middle.open_step()
        assert lengths is not None and not lengths.micro_batch(0).tokens.any()
        for name in ("position_ids", "cu_seqlens", "cu_seqlens_padded", "padding_mask"):
            found = getattr(lengths.micro_batch(0), name)
            assert found.tolist() == getattr(step.micro_batch(0), name).tolist()
        assert middle.finish_step() == whole.finish_step()
    assert middle.open_step() is None and middle.cursor == whole.cursor


def test_damage_in_the_next_batch_is_told_at_its_boundary(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [2, 2])
    (tmp_path / "r" / "batch-00000001" / "part-00000.parquet").write_bytes(b"PAR1")
    steps = feed(source)
    assert trained_numbers(steps, limit=1) == [[1, 2]]
    with pytest.raises(ValueError, match="batch-00000001/part-00000.parquet: cannot be read"):
        steps.open_step()
    assert steps.cursor.batch_id == 1 and steps.cursor.consumed_rollouts == 2


def test_samples_can_be_completed_when_a_batch_opens(tmp_path: Path) -> None:
    source = directory(tmp_path / "r", [3, 1])
    steps = feed(source, rollouts_per_step=2)
    opened: list[int] = []

    def add_values(batch: LoadedBatch) -> dict[int, Sample]:
        opened.append(batch.batch_id)
        return {r: replace(s, values=[r + 0.5] * 2) for r, s in batch.samples.items()}

    steps.on_batch_opened = add_values
    step = steps.open_step()
    assert step is not None
    values = step.micro_batch(0).columns["values"]
    assert values.tolist() == [[0.5, 0.5, 0.0, 1.5, 1.5, 0.0, 2.5, 2.5, 0.0]]
    steps.finish_step()
    assert trained_numbers(steps) == [[3], [4]]
    assert opened == [0, 1]

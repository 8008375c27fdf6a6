"""One bad input for each message of docs/errors.md."""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynbatch import errors, failpoints
from megatron_dynbatch.cli.main import build_parser
from megatron_dynbatch.handshake import read_layout
from megatron_dynbatch.hooks.arguments import check_unknown_total, imply
from megatron_dynbatch.hooks.balance import StepBalance
from megatron_dynbatch.hooks.loss import weighted_output
from megatron_dynbatch.hooks.policy import batch_needed
from megatron_dynbatch.hooks.tracker import TRACKER, mend_tracker
from megatron_dynbatch.layout import build_micro_batch
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.plan.cost import CostModel
from megatron_dynbatch.plan.splitters import find_splitter
from megatron_dynbatch.rollouts import (
    RolloutDirectory,
    RolloutQueue,
    SampleIndex,
    open_transport,
)
from megatron_dynbatch.rollouts.flow import wait_for_room, wait_for_weights
from megatron_dynbatch.steps import Cursor, Exchange, Staleness, StepFeed
from megatron_dynbatch.steps.empty_batches import EmptyBatches
from megatron_dynbatch.steps.ledger import Entry, Ledger, read_ledger
from tests.cli.run_folder import write_run
from tests.hooks.helpers import training_options
from tests.reliability.bad_data import OPTIONS, SAMPLES, STORAGE, BadInput, good, noted, written


def planned(lengths: list[int], layout: ParallelLayout | None = None, **options: Any) -> BadInput:
    """Samples of these lengths, planned with these options."""

    def plan(path: Path) -> object:
        ones = [1] * len(lengths)
        index = SampleIndex(lengths, ones, ones, [-1] * len(lengths), [-1] * len(lengths))
        chosen = PlanOptions(**{"max_tokens_per_gpu": 16, **options})
        return make_plan(index, layout or ParallelLayout(), chosen)

    return plan


def _large_group(path: Path) -> object:
    index = SampleIndex([2, 2, 2], [1, 1, 1], [1, 1, 1], [0, 1, 2], [0, 0, 0])
    options = replace(OPTIONS, loss_reduction="group", rollouts_per_step=2)
    return make_plan(index, ParallelLayout(), options)


def _splitter_that_leaves_out(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    return [[0]]


def _plan(change: Callable[[dict[str, Any]], object]) -> BadInput:
    """The JSON of a plan of two samples, changed."""

    def read(path: Path) -> object:
        index = SampleIndex([2, 2], [1, 1], [1, 1], [0, 1], [-1, -1])
        values = json.loads(make_plan(index, ParallelLayout(), OPTIONS).to_json())
        change(values)
        plan = Plan.from_json(json.dumps(values))
        plan.check()
        return plan

    return read


_ONE_SAMPLE = (SampleIndex([2], [1], [1], [0], [-1]), ParallelLayout(), OPTIONS)

PLANS: dict[str, BadInput] = {
    "a sample longer than a micro-batch": planned([17]),
    "two ways to make micro-batches": planned([2], micro_batch_size=2),
    "a token cap of zero": planned([2], max_tokens_per_gpu=0),
    "an unknown leftover policy": planned([2], leftover="keep"),
    "a constant without its reduction": planned([2], loss_constant=3.0),
    "a constant of zero": planned([2], loss_reduction="constant", loss_constant=0.0),
    "a micro-batch of its own at fixed width": planned([2], fixed_width=True, oversize="alone"),
    "a logit cap without vocabulary": planned([2], max_logits_per_gpu=100),
    "a cap below one row": planned([2], ParallelLayout(cp=8), max_tokens_per_gpu=1),
    "a width that cannot be shared": planned(
        [2], ParallelLayout(tp=4, sequence_parallel=True), max_tokens_per_gpu=17, fixed_width=True
    ),
    "a billion ranks": lambda path: ParallelLayout(dp=10**9),
    "a layout of words": lambda path: ParallelLayout(sequence_parallel="yes"),  # type: ignore[arg-type]
    "a plan of dummies": planned([2] * 300, ParallelLayout(dp=2**16), rollouts_per_step=1),
    "a cost beyond float64": lambda path: CostModel(alpha=1e300),
    "a width that is a word": planned([2], fixed_width="yes"),
    "a schedule of words": lambda path: Plan.from_schedule(
        ([["0"]], [[[0]]], [1], [1]),
        *_ONE_SAMPLE,  # type: ignore[arg-type]
    ),
    "three lists as a schedule": lambda path: Plan.from_schedule(
        ([], [], []),
        *_ONE_SAMPLE,  # type: ignore[arg-type]
    ),
    "a number in the place of a partition": lambda path: Plan.from_schedule(
        ([0], [[[0]]], [1], [1]),
        *_ONE_SAMPLE,  # type: ignore[arg-type]
    ),
    "a plan with a row of 1.5": _plan(
        lambda values: values["steps"][0]["micro_batches"][0].append([1.5])
    ),
    "a plan with a key twice": lambda path: Plan.from_json('{"version": 1, "version": 1}'),
    "virtual stages without stages": lambda path: ParallelLayout(vpp=2),
    "an unknown splitter": lambda path: find_splitter("by_luck"),
    "a splitter that cannot be imported": lambda path: find_splitter("no_such_module:split"),
    "a splitter that leaves a rollout out": planned(
        [2, 2], step_splitter=f"{__name__}:_splitter_that_leaves_out"
    ),
    "a prompt group larger than a step": _large_group,
    "a plan that is no JSON": lambda path: Plan.from_json("{"),
    "a plan of another version": _plan(lambda values: values.update(version=99)),
    "a plan that trains a sample twice": _plan(
        lambda values: values["steps"][0]["micro_batches"][0][0].append(0)
    ),
    "a layout note of another version": noted("layout", '{"layout": {}}', read_layout),
}


def flags(**changed: Any) -> BadInput:
    """Megatron's parsed arguments with these changes."""
    values: dict[str, Any] = {
        "rollout_path": "rollouts", "rollouts_per_step": 4, "max_tokens_per_gpu": 64,
        "train_samples": 100, "train_iters": None, "global_batch_size": None,
        "micro_batch_size": None, "context_parallel_size": 1, "micro_batch_width": "fixed",
        "seq_length": None, "lr_decay_samples": None, "lr_decay_style": "linear",
        "lr_warmup_fraction": None, "weight_decay_incr_style": "constant",
    }  # fmt: skip

    def check(path: Path) -> None:
        args = argparse.Namespace(**{**values, **changed})
        imply(args)
        check_unknown_total(args)

    return check


OPTION_ERRORS: dict[str, BadInput] = {
    "no rollout path": flags(rollout_path=None),
    "a horizon in iterations for whole batches": flags(
        rollouts_per_step="batch", train_samples=None, train_iters=10
    ),
    "an LR schedule without end": flags(train_samples=None, lr_decay_style="cosine"),
    "a warm-up that is a part of nothing": flags(
        train_samples=None, lr_decay_style="constant", lr_warmup_fraction=0.1
    ),
    "a weight decay without end": flags(
        train_samples=None, lr_decay_samples=100, weight_decay_incr_style="linear"
    ),
    "a global batch size": flags(global_batch_size=8),
    "a micro-batch size": flags(micro_batch_size=2),
    "another sequence length": flags(seq_length=32),
    "a negative staleness": lambda path: Staleness(-1),
    "no empty batch at all": lambda path: EmptyBatches(0),
    "a generator that is not named by module and function": lambda path: batch_needed(
        [], training_options(on_batch_needed="generate")
    ),
    "a queue without name": lambda path: open_transport("queue:"),
    "a bucket as the rollout path": lambda path: open_transport("s3://bucket/rollouts"),
    "a bucket as a directory": lambda path: RolloutDirectory("gs://bucket/rollouts"),
    "no rollout path at all": lambda path: open_transport(None),  # type: ignore[arg-type]
    "an empty rollout path": lambda path: open_transport(""),
    "a NUL in the rollout path": lambda path: open_transport("rollouts\0"),
    "a rollout path of one long name": lambda path: open_transport("r" * 300),
    "half a character in the rollout path": lambda path: open_transport("\ud800"),
    "a Ray address that is none": lambda path: open_transport("ray://[::1/name"),
    "two journals": lambda path: open_transport("ray:///name?journal=a&journal=b"),
    "a Ray actor without name": lambda path: open_transport("ray://127.0.0.1:6379"),
}


def command(*words: str) -> BadInput:
    """`megatron-dynbatch` with these words, in an empty folder; HERE stands for the folder."""

    def run(path: Path) -> object:
        argv = [word.replace("HERE", str(path)) for word in words]
        args = build_parser(argv).parse_args(argv)
        return args.run(args)

    return run


def _past_the_end(path: Path) -> object:
    directory = RolloutDirectory(path)
    directory.write([good()])
    directory.finish()
    return command("plan", "--rollouts", "HERE", "--batch", "5")(path)


def _run_folder(with_rollouts: bool) -> BadInput:
    def fit(path: Path) -> object:
        write_run(path, num_batches=1)
        if not with_rollouts:
            shutil.rmtree(path / "rollouts")
        return command("fit-cost", "HERE")(path)

    return fit


def _without_rollouts(path: Path) -> object:
    write_run(path, num_batches=1)
    return command("report", "HERE", "--rollouts", "HERE/none")(path)


_ONE_STEP = ("plan", "--distribution", "A", "--plot", "HERE/a.png", "--step", "3")
COMMANDS: dict[str, BadInput] = {
    "plan of a directory that is not there": command("plan", "--rollouts", "HERE/none"),
    "plan of a batch that is not there yet": command("plan", "--rollouts", "HERE"),
    "plan of a batch past the end": _past_the_end,
    "plan of a file that is not there": command("plan", "--lengths", "HERE/none.jsonl"),
    "picture of a step that is not there": command(*_ONE_STEP),
    "a report of steps that are not there": command("report", "HERE", "--steps", "HERE/none"),
    "a report with rollouts that are not there": _without_rollouts,
    "a fit of nothing": command("fit-cost", "HERE/none"),
    "a fit of too few steps": _run_folder(with_rollouts=True),
    "a fit without rollouts": _run_folder(with_rollouts=False),
    "examples over others": lambda path: [command("examples", "HERE")(path) for _ in range(2)],
}
NO_SOURCE: dict[str, Any] = {"source_id": "", "source_name": "", "stamps": {}}


def _other_steps(path: Path) -> object:
    return replace(Cursor(), step_index=1, steps_digest="a").in_batch({}, "b", NO_SOURCE)


def _other_options(path: Path) -> object:
    cursor = Cursor().in_batch({"rollouts_per_step": 4}, "a", NO_SOURCE).after_step(4, empty=False)
    cursor.check_options({"rollouts_per_step": 8})
    return cursor


def _other_experts(path: Path) -> object:
    saved = {"tokens": 4, "counts": [[4, 4], [8, 0]]}
    return StepBalance(2, 4, 2, from_same_step=False, saved=saved)


def _empty_tracker(path: Path) -> object:
    (path / TRACKER).touch()
    return mend_tracker(path)


def _resumed(change: Callable[[Path], object]) -> BadInput:
    """A run that stopped inside a batch and goes on after a change of its directory."""

    def resume(path: Path) -> object:
        directory = written(path / "r")
        options = replace(OPTIONS, rollouts_per_step=1)
        feed = StepFeed(directory, ParallelLayout(), options)
        feed.open_step(), feed.finish_step(), feed.close()
        change(path)
        again = StepFeed(RolloutDirectory(path / "r"), ParallelLayout(), options)
        again.restore(feed.cursor)
        return again.open_step()

    return resume


def _another_directory(path: Path) -> None:
    shutil.rmtree(path / "r")
    written(path / "r")


def _another_batch(path: Path) -> None:
    shutil.rmtree(path / "r" / "batch-00000000")
    RolloutDirectory(path / "r").write([good(rollout_id=0), good(rollout_id=2)])


def _carried_row(path: Path) -> object:
    queue = RolloutQueue("generator")
    for _ in range(2):
        queue.write([good()])
    feed = StepFeed(queue, ParallelLayout(), OPTIONS)
    feed.restore(Cursor(batch_id=1, carried=((0, 5),)))
    return feed.open_step()


def saved(**changed: object) -> BadInput:
    """The cursor of a checkpoint with these changes; `...` leaves a field out."""
    values = {**Cursor().to_dict(), **changed}
    return lambda path: Cursor.from_dict({k: v for k, v in values.items() if v is not ...})


RESUMES: dict[str, BadInput] = {
    "an empty tracker and no checkpoint": _empty_tracker,
    "another directory": _resumed(_another_directory),
    "a batch in the place of another": _resumed(_another_batch),
    "a carried row that is not there": _carried_row,
    "a cursor that is a list": lambda path: Cursor.from_dict([]),  # type: ignore[arg-type]
    "a cursor without its batch": saved(batch_id=...),
    "a cursor with a field of the future": saved(epoch=1),
    "a cursor at a negative step": saved(step_index=-1),
    "a cursor that carries a sample twice": saved(batch_id=3, carried=[[1, 2], [1, 2]]),
    "a cursor that carries a sample of its own batch": saved(carried=[[0, 2]]),
    "expert counts of another model": _other_experts,
    "another step size inside a batch": _other_options,
    "other steps inside a batch": _other_steps,
}


def _two_ranks(store: dist.Store | None = None) -> tuple[Exchange, Exchange]:
    store = store or dist.HashStore()
    first, second = (Exchange(store, rank, 2, timeout=0.05) for rank in range(2))
    return first, second


def _disagree(path: Path) -> object:
    first, second = _two_ranks()
    second._set("1/compare/1", json.dumps([{"--lr": "0.02"}, {}]))
    return first.compare({"--lr": "0.01"})


def _told(path: Path) -> object:
    first, second = _two_ranks()
    first.fail(OSError("the disk is gone"))
    return second.broadcast(str, "the plan", 1.0)


def _restarted(path: Path) -> object:
    store = dist.HashStore()
    _two_ranks(store)
    return Exchange(store, 1, 2, timeout=0.05)


def _no_batch(path: Path) -> object:
    queue = RolloutQueue("generator")
    return StepFeed(queue, ParallelLayout(), OPTIONS, batch_timeout=0.05).open_step()


def _logits_without_keyword(path: Path) -> object:
    index = SampleIndex.from_samples([good()])
    plan = make_plan(index, ParallelLayout(), OPTIONS)
    micro_batch = build_micro_batch(plan, 0, 0, 0, {0: good()})
    return weighted_output(torch.zeros(1, 3, 8), micro_batch)


def _without_torch(path: Path) -> object:
    kept = sys.modules["torch"]
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return runpy.run_path(str(Path(errors.__file__).with_name("_torch.py")))
    finally:
        sys.modules["torch"] = kept


def _full_disk(path: Path) -> None:
    failpoints.arm(failpoints.Failpoint.parse("ledger:middle:1:enospc"))
    try:
        Ledger(path / "ledger").append(Entry(0, 0))
    finally:
        failpoints.arm(None)


def _damaged_ledger(path: Path) -> object:
    (path / "ledger").write_text("hello\n")
    return read_ledger(path / "ledger")


RUNS: dict[str, BadInput] = {
    "a ledger in a folder that is not there": lambda path: Ledger(path / "a" / "b").open(),
    "a ledger on a full disk": _full_disk,
    "a ledger with something else in it": _damaged_ledger,
    "a part that computes, without torch": _without_torch,
    "ranks with two learning rates": _disagree,
    "a rank that does not come": lambda path: _two_ranks()[0].compare({"plan": "a"}),
    "a rank that was restarted alone": _restarted,
    "an error on another rank": _told,
    "no batch in time": _no_batch,
    "training that does not go on": lambda path: wait_for_room(
        RolloutQueue("generator"), 5, 1, timeout=0
    ),
    "weights that do not come": lambda path: wait_for_weights(
        RolloutQueue("generator"), 3, timeout=0
    ),
    "logits without keyword": _logits_without_keyword,
}

BAD_INPUT: dict[str, BadInput] = {
    **SAMPLES, **STORAGE, **PLANS, **OPTION_ERRORS, **COMMANDS, **RESUMES, **RUNS
}  # fmt: skip

# Messages of the page that need Megatron's arguments or a training, and the test that calls
# `catalogue.shown` with what was raised.
SHOWN_ELSEWHERE = {
    "--dynamic-global-batch cannot be used like this": (
        "tests/hooks/test_arguments.py::test_wrong_command_lines_are_told_before_training"
    ),
    "…: its row in docs/parity.md": (
        "tests/hooks/test_traits.py::test_a_row_stands_from_a_version_on"
    ),
    "… with …: no parity test has both": (
        "tests/hooks/test_command_lines.py"
        "::test_a_pair_that_is_refused_says_which_and_what_to_write"
    ),
    "--keep-batches": (
        "tests/hooks/test_arguments.py::test_wrong_command_lines_are_told_before_training"
    ),
    "the checkpoint counts": (
        "tests/hooks/test_session.py"
        "::test_a_checkpoint_without_cursor_is_taken_at_its_beginning_only"
    ),
    "the loss function must return one scalar": (
        "tests/hooks/test_loss.py::test_a_loss_that_returns_no_scalar_is_named"
    ),
    "rank … (DP rank …): the loss of step": (
        "tests/reliability/test_numbers.py::test_an_infinite_loss_names_sample_rollout_and_rank"
    ),
    "training would go on at rollout batch": (
        "tests/hooks/test_retention.py::test_a_run_from_the_beginning_needs_all_batches"
    ),
    "megatron_dynbatch.install() hooks": (
        "tests/versions/test_imports.py::test_plain_functions_need_no_megatron_training"
    ),
    "this Megatron does not match": (
        "tests/hooks/test_sites.py::test_a_wrong_count_changes_nothing_and_names_every_site"
    ),
    "the forward step asks its batch for": (
        "tests/hooks/test_first_batch.py::test_each_mistake_is_told_with_what_is_there"
    ),
    "the forward step asks its micro-batch for": (
        "tests/hooks/test_first_batch.py::test_each_mistake_is_told_with_what_is_there"
    ),
    "… takes no packed_seq_params": (
        "tests/hooks/test_first_batch.py::test_each_mistake_is_told_with_what_is_there"
    ),
    "the forward step calls … without packed_seq_params": (
        "tests/hooks/test_first_batch.py::test_each_mistake_is_told_with_what_is_there"
    ),
    "the forward step tells": (
        "tests/hooks/test_first_batch.py::test_each_mistake_is_told_with_what_is_there"
    ),
    "the forward step calls …, which learns": (
        "tests/hooks/test_first_batch.py::test_each_mistake_is_told_with_what_is_there"
    ),
    "--admit-unproven": (
        "tests/hooks/test_arguments.py::test_wrong_command_lines_are_told_before_training"
    ),
    "the model is a": "tests/hooks/test_traits.py::test_another_model_class_is_refused",
    "the model has a loss term": (
        "tests/hooks/test_traits.py"
        "::test_a_loss_term_that_no_hook_weights_is_refused_where_it_is_used"
    ),
    "--mtp-num-layers with": (
        "tests/hooks/test_mtp_inputs.py::test_a_model_that_takes_no_mask_and_no_output_processor"
    ),
}

"""One bad input for each message of docs/errors.md."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynbatch.hooks.arguments import imply
from megatron_dynbatch.hooks.balance import StepBalance
from megatron_dynbatch.hooks.horizon import check_unknown_total
from megatron_dynbatch.hooks.loss import weighted_output
from megatron_dynbatch.layout import build_micro_batch
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.plan.handshake import read_layout
from megatron_dynbatch.plan.splitters import find_splitter
from megatron_dynbatch.rollouts import RolloutQueue, SampleIndex, open_transport
from megatron_dynbatch.rollouts.flow import wait_for_room, wait_for_weights
from megatron_dynbatch.steps import Cursor, Exchange, Staleness, StepFeed
from tests.reliability.bad_data import OPTIONS, SAMPLES, STORAGE, BadInput, good, noted


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
    "a queue without name": lambda path: open_transport("queue:"),
    "a Ray actor without name": lambda path: open_transport("ray://127.0.0.1:6379"),
}


def _other_steps(path: Path) -> object:
    return replace(Cursor(), step_index=1, steps_digest="a").in_batch({}, "b")


def _other_options(path: Path) -> object:
    cursor = Cursor().in_batch({"rollouts_per_step": 4}, "a").after_step(4, empty=False)
    cursor.check_options({"rollouts_per_step": 8})
    return cursor


def _other_experts(path: Path) -> object:
    saved = {"tokens": 4, "counts": [[4, 4], [8, 0]]}
    return StepBalance(2, 4, 2, from_same_step=False, saved=saved)


RESUMES: dict[str, BadInput] = {
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


RUNS: dict[str, BadInput] = {
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

BAD_INPUT: dict[str, BadInput] = SAMPLES | STORAGE | PLANS | OPTION_ERRORS | RESUMES | RUNS

# Messages of the page that whole trainings show, and where.
SHOWN_ELSEWHERE = {
    "--dynamic-global-batch cannot be used like this": "tests/hooks/test_arguments.py",
    "--admit-unproven": "tests/hooks/test_arguments.py",
    "the model is a": "tests/hooks/test_traits.py",
    "the model has a loss term": "tests/hooks/test_traits.py",
    "--mtp-num-layers with": "tests/hooks/test_mtp_inputs.py",
    "--keep-batches": "tests/hooks/test_arguments.py",
    "--on-batch-needed": "tests/hooks/test_arguments.py",
    "the checkpoint counts": "tests/parity/test_resume.py",
    "the loss function must return one scalar": "tests/hooks/test_loss.py",
    "rank … (DP rank …): the loss of step": "tests/reliability/test_numbers.py",
    "this Megatron does not match": "tests/hooks/test_sites.py",
}

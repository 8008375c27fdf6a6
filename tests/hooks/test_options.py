"""The options of a run, and that hooks read Megatron's arguments nowhere else."""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from megatron_dynbatch.hooks.live_args import LiveArgs
from megatron_dynbatch.hooks.options import UNBOUNDED
from megatron_dynbatch.steps.announce import Staleness
from tests.hooks.helpers import arguments, training_options
from tests.pool import ROOT

HOOKS = ROOT / "megatron_dynbatch" / "hooks"
# What makes the options, what writes to arguments, and what refuses a command line.
READERS = {"arguments", "options", "live_args", "admission", "refusals", "trait", "traits"}


def reads_arguments(path: Path) -> list[int]:
    """Lines that read or write an attribute of `args`, `run.args` or `self.args`."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        target = None
        if isinstance(node, ast.Attribute):
            target = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            target = node.args[0]
        if target is not None and ast.unparse(target) in ("args", "run.args", "self.args"):
            lines.append(node.lineno)
    return lines


def test_arguments_are_read_in_few_files() -> None:
    found = {path.stem for path in HOOKS.glob("*.py") if reads_arguments(path)}
    assert found <= READERS
    assert {"arguments", "options", "admission"} <= found  # the search finds something


def test_how_training_ends() -> None:
    def ends(**changed: object) -> tuple[object, ...]:
        options = training_options(lr_decay_style="linear", global_batch_size=8, **changed)
        return (
            options.counts_rollouts, options.train_samples, options.train_iters,
            options.lr_horizon,
        )  # fmt: skip

    assert ends(train_samples=90) == (True, 90, None, 90)
    # Megatron fills in train_iters once it has built its scheduler.
    assert ends(train_samples=90, train_iters=11, lr_decay_samples=70) == (True, 90, None, 70)
    assert ends(train_samples=UNBOUNDED, lr_decay_samples=70) == (True, None, None, 70)
    assert ends(train_iters=10) == (False, None, 10, 80)
    assert ends(train_iters=10, lr_decay_iters=5) == (False, None, 10, 40)
    assert training_options(train_samples=90).lr_horizon is None  # constant


def test_values_that_follow_from_several_arguments() -> None:
    options = training_options(max_staleness=3, stale_rollouts="train", load="a", save="")
    assert options.staleness == Staleness(3, "train")
    assert (options.load, options.save) == (Path("a"), None)
    assert not (options.has_aux_losses or options.evaluates or options.gathers_late)
    assert training_options(mtp_num_layers=1).has_aux_losses
    assert training_options(eval_iters=2).evaluates
    assert training_options(full_validation=True).evaluates
    late = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    assert training_options(**late).gathers_late
    assert training_options(check_for_nan_in_loss_and_grad=True).stops_at_non_finite
    replayed = {"check_for_nan_in_loss_and_grad": True, "rerun_mode": "validate_results"}
    assert not training_options(**replayed).stops_at_non_finite
    with pytest.raises(FrozenInstanceError):
        options.num_experts = 4  # type: ignore[misc]


def test_what_is_written_to_megatrons_arguments() -> None:
    args = arguments(consumed_train_samples=7, do_valid=1)
    live = LiveArgs(args)
    assert (live.consumed_rollouts, live.balance) == (7, None)
    live.consumed_rollouts = 9
    live.keep_cursor({"batch_id": 2})
    live.balance = {"tokens": 5}
    live.tell_of_data(has_evaluation=True)
    assert (args.consumed_train_samples, args.dynbatch_cursor) == (9, {"batch_id": 2})
    assert args.dynbatch_balance == live.balance == {"tokens": 5}
    assert (args.do_train, args.do_valid) == (1, 1)
    live.tell_of_data(has_evaluation=False)
    assert (args.do_train, args.do_valid, args.do_test) == (1, 0, 0)

"""The plugin's flags in Megatron's own parser, and what follows from them.

Seam: ``megatron.training.arguments.add_megatron_arguments``.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Callable
from typing import Any

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks.admission import refused, warn_of_packing
from megatron_dynbatch.hooks.loss_terms import guard_scaled_terms
from megatron_dynbatch.hooks.options import UNBOUNDED, TrainingOptions
from megatron_dynbatch.hooks.tracker import mend_tracker
from megatron_dynbatch.plan.flags import TRAINING_FLAGS, options_as_typed
from megatron_dynbatch.plan.options import (
    EMPTY_ROLLOUT_POLICIES,
    LEFTOVER_POLICIES,
    LOSS_REDUCTIONS,
    ORDERS,
    OVERSIZE_POLICIES,
)
from megatron_dynbatch.rollouts import open_transport
from megatron_dynbatch.rollouts.flow import PROGRESS_NOTE
from megatron_dynbatch.steps.announce import STALE_POLICIES
from megatron_dynbatch.steps.config import MOST_EMPTY_BATCHES
from megatron_dynbatch.steps.empty_batches import EmptyBatches

WIDTHS = ("fixed", "variable")
BALANCES = ("micro-batch", "previous-step", "same-step")
PROGRESS = ("auto", "bar", "plain", "off")


def adding_arguments(add: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``add_megatron_arguments`` so that the parser knows our flags too."""

    @functools.wraps(add)
    def add_with_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add(parser)
        _add_flags(parser)
        _mend_help(parser)
        _after_parsing(parser)
        return parser

    return add_with_ours


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(title="dynamic global batch (megatron_dynbatch)")
    add = group.add_argument
    add("--dynamic-global-batch", action="store_true",
        help="Take every training step, of any size, from planned rollouts.")
    add("--rollout-path", metavar="PATH",
        help="Where the rollout side writes batches: a directory, ray://HOST:PORT/NAME "
        "(ray:///NAME: the cluster of this machine), or queue:NAME (this process).")
    add("--rollouts-per-step", type=_rollouts_per_step, metavar="N|batch",
        help="Rollouts in a step at most; 'batch' takes each rollout batch as one step.")
    add("--max-tokens-per-gpu", type=int, metavar="N",
        help="Tokens of a micro-batch on one GPU at most, counted as laid out.")
    add("--loss-reduction", choices=LOSS_REDUCTIONS, default="rollout",
        help="What the loss of a step averages over (default: rollout).")
    add("--loss-constant", type=float, metavar="D",
        help="Denominator of every sample under --loss-reduction constant.")
    add("--leftover", choices=LEFTOVER_POLICIES, default="partial",
        help="Rollouts at the end of a batch that do not fill a step (default: partial).")
    add("--empty-rollouts", choices=EMPTY_ROLLOUT_POLICIES, default="count",
        help="Whether a rollout without trained tokens counts in the denominator.")
    add("--oversize", choices=OVERSIZE_POLICIES, default="error",
        help="What happens to a sample longer than a micro-batch (default: error).")
    add("--micro-batch-width", choices=WIDTHS, default="fixed",
        help="fixed: each micro-batch is padded to --seq-length, as stock scripts need; "
        "variable: each has its own length (scripts that use megatron_dynbatch.get_batch).")
    add("--micro-batch-order", choices=ORDERS, default="auto",
        help="Order of a rank's micro-batches; heaviest_first lets the allocator meet its largest "
        "shapes at once (default: auto, the fastest predicted).")
    add("--step-splitter", default="rollouts", metavar="NAME|pkg.mod:fn",
        help="How rollouts are grouped into steps.")
    add("--tokens-per-step", type=int, metavar="N",
        help="Tokens of a step at most, with --step-splitter tokens.")
    add("--batch-timeout", type=float, default=1800.0, metavar="SECONDS",
        help="How long to wait for the next rollout batch or the END marker (default: 1800).")
    add("--wait-for-path", action="store_true",
        help="Wait for --rollout-path as long as for a batch, where it is not there at the start "
        "(default: a minute, or --batch-timeout if that is less).")
    add("--max-empty-batches", type=int, default=MOST_EMPTY_BATCHES, metavar="N",
        help="N rollout batches in a row that train nothing are an error "
        f"(default: {MOST_EMPTY_BATCHES}).")
    add("--agreement-timeout", type=float, default=300.0, metavar="SECONDS",
        help="How long ranks wait for each other at a batch boundary (default: 300).")
    add("--on-batch-needed", metavar="pkg.mod:fn",
        help="Function (cursor, model_chunks) called on every rank when the next batch is not "
        "there yet.")
    add("--on-batch-opened", metavar="pkg.mod:fn",
        help="Function (batch, model_chunks) called on every rank before the first step of a "
        "batch; returns its samples, with log-probs of a forward-only pass for example.")
    add("--max-staleness", type=int, metavar="BATCHES",
        help="Rollouts sampled by weights that are more batches old than this are stale "
        "(default: none is).")
    add("--stale-rollouts", choices=STALE_POLICIES, default="drop",
        help="drop: stale rollouts are left out and counted; train: they are trained, and the "
        "loss weighs them by their rollout_log_probs (default: drop).")
    add("--keep-batches", type=int, metavar="N",
        help="Delete rollout batches once a completed checkpoint lies more than N batches beyond "
        "them (default: keep all).")
    add("--rollout-ledger", metavar="FILE",
        help="JSONL file in which rank 0 notes the rollouts of each finished step.")
    add("--rollouts-moved", action="store_true",
        help="The rollouts lie in another directory than when the checkpoint was saved: go on if "
        "its batches are the same.")
    add("--moe-balance", choices=BALANCES, default="micro-batch",
        help="Whose expert frequencies the load-balancing loss takes: each micro-batch's, as "
        "Megatron does; those of the previous step; or those of the same step, by a forward-only "
        "pass that costs about a third of the step's time. The last two make it independent of the "
        "packing (default: micro-batch).")
    add("--admit-unproven", nargs="+", action="extend", metavar="TRAIT",
        help="Train with these properties, or pairs of them (A+B), although no parity test proves "
        "them; a refusal names them.")
    add("--step-report", metavar="FILE", help="JSONL file that gets one line per step.")
    add("--step-progress", choices=PROGRESS, default="auto",
        help="How rank 0 shows the step of the batch and the micro-batch of the step that run: "
        "auto: bars on a terminal (with rich), elsewhere a line in ten seconds at most; "
        "bar, plain, off (default: auto).")


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Double lone percent signs: one of them (0.19, paged stash) makes ``--help`` raise."""
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"(?<!%)%(?![%(])", "%%", action.help)


def _rollouts_per_step(text: str) -> int | str:
    if text == "batch":
        return text
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer or 'batch'")
    return count


def _after_parsing(parser: argparse.ArgumentParser) -> None:
    """Let the values that our flags imply stand before Megatron validates anything."""
    parse = parser.parse_known_args

    def parse_then_imply(*positional: Any, **named: Any) -> tuple[argparse.Namespace, list[str]]:
        args, rest = parse(*positional, **named)
        if args.dynamic_global_batch:
            try:
                imply(args)
            except ValueError as error:
                parser.error(str(error))
        return args, rest

    parser.parse_known_args = parse_then_imply  # type: ignore[method-assign, assignment]


def imply(args: argparse.Namespace) -> None:
    """Set what follows from our flags; OptionError where other flags contradict them."""
    for flag in ("rollout_path", "rollouts_per_step", "max_tokens_per_gpu"):
        if getattr(args, flag) is None:
            raise OptionError(f"--dynamic-global-batch needs --{flag.replace('_', '-')}")
    per_step = args.rollouts_per_step
    if per_step == "batch" and args.train_iters:
        raise OptionError(
            "--rollouts-per-step batch goes with --train-samples (in rollouts), or with neither "
            "if END ends the run: without a step size the LR horizon cannot be counted in "
            "iterations"
        )
    if not (args.train_samples or args.train_iters):
        args.train_samples = UNBOUNDED  # the END marker ends training
    # Only Megatron's iterations × batch size horizons read it from here on.
    size = 1 if per_step == "batch" else per_step
    if args.global_batch_size not in (None, size):
        raise OptionError(
            f"--global-batch-size {args.global_batch_size} does not fit --rollouts-per-step "
            f"{per_step}; leave --global-batch-size out"
        )
    args.global_batch_size = size
    if args.micro_batch_size not in (None, 1):
        raise OptionError(
            f"--micro-batch-size {args.micro_batch_size}: a micro-batch is one pack of samples "
            "(--max-tokens-per-gpu); leave --micro-batch-size out"
        )
    args.micro_batch_size = 1
    if getattr(args, "eval_global_batch_size", 0) is None:
        # Evaluation keeps Megatron's rule that DP ranks share it evenly.
        args.eval_global_batch_size = _whole_shares(size, args)
    width = args.max_tokens_per_gpu * args.context_parallel_size
    if args.micro_batch_width == "variable":
        if args.seq_length is None:
            args.seq_length = width
        if args.num_experts is None:
            # The default, allgather, is refused with variable lengths even where it is not used.
            args.moe_token_dispatcher_type = "alltoall"
        return
    if args.seq_length not in (None, width):
        raise OptionError(
            f"--seq-length {args.seq_length} must be --max-tokens-per-gpu times "
            f"--context-parallel-size = {width}: stock batches have that fixed width"
        )
    args.seq_length = width
    # The stock batch contract that carries packed sequences.
    args.sft = True
    args.create_attention_mask_in_dataloader = False


def _whole_shares(size: int, args: argparse.Namespace) -> int:
    model_size = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    dp = max(1, int(os.environ.get("WORLD_SIZE", "1")) // model_size)
    return max(dp, size // dp * dp)


def is_dynamic(args: argparse.Namespace) -> bool:
    """Whether parsed arguments ask for the plugin; those of another parser do not know its flag."""
    return getattr(args, "dynamic_global_batch", False)


def settle_args(args: argparse.Namespace) -> None:
    """Check arguments that Megatron has validated, and set what its validation resets.

    Raises:
        OptionError: One line per combination that is refused, or the option that is wrong.
    """
    reasons = refused(args)
    if reasons:
        raise OptionError(
            "--dynamic-global-batch cannot be used like this:\n"
            + "\n".join(f"  {reason}" for reason in reasons)
        )
    with options_as_typed(TRAINING_FLAGS):
        options = TrainingOptions.from_args(args)
        options.plan.capacity(options.layout)
    check_unknown_total(args)
    if args.keep_batches is not None and args.keep_batches < 0:
        raise OptionError(
            f"--keep-batches {args.keep_batches}: give a number of batches, 0 or more"
        )
    EmptyBatches(args.max_empty_batches)  # raises if it is no number of batches
    # Raises if the path is something else than rollouts, whichever batches are still there.
    open_transport(options.rollout_path).published(PROGRESS_NOTE)
    if options.load is not None:
        mend_tracker(options.load)
    guard_scaled_terms()
    warn_of_packing(args)
    if args.micro_batch_width == "variable":
        args.variable_seq_lengths = True


def check_unknown_total(args: argparse.Namespace) -> None:
    """Raise OptionError if a schedule needs a length that is not given."""
    if args.train_samples != UNBOUNDED:
        return
    without_horizon = args.lr_decay_samples is None
    if without_horizon and args.lr_decay_style != "constant":
        raise OptionError(
            f"how many rollouts there will be is not known (neither --train-samples nor "
            f"--train-iters is given), so --lr-decay-style {args.lr_decay_style} has no end: give "
            "--lr-decay-samples (in rollouts), or --lr-decay-style constant (after warm-up)"
        )
    if without_horizon and args.lr_warmup_fraction is not None:
        raise OptionError(
            "--lr-warmup-fraction is a part of --lr-decay-samples, which is not given: give "
            "--lr-warmup-samples (in rollouts)"
        )
    if args.weight_decay_incr_style != "constant":
        raise OptionError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --train-samples (in "
            "rollouts): weight decay rises until the end of training"
        )

"""``megatron-dynbatch plan``: what a batch would become under a layout, with the reasons."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from megatron_dynbatch.cli.plan_input import read_index
from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.plan import CostModel, ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.plan.distributions import DISTRIBUTIONS
from megatron_dynbatch.plan.flags import COMMAND_FLAGS, options_as_typed
from megatron_dynbatch.plan.options import (
    EMPTY_ROLLOUT_POLICIES,
    LEFTOVER_POLICIES,
    LOSS_REDUCTIONS,
    ORDERS,
    OVERSIZE_POLICIES,
)
from megatron_dynbatch.plan.summary import StepSummary, summarize
from megatron_dynbatch.wording import counted

DESCRIPTION = """\
Plans a batch without training on it: from a rollout directory, from a Parquet or JSONL file of
lengths (columns length, and if there are any response_length, mask_sum, rollout_id, group_id),
or from a named distribution. Prints a row per step. M is micro-batches per DP rank, beside the
fewest that any packing could need; balance is the most loaded rank over the bound of any
placement; lock-step is what ranks pay that wait for each other at every micro-batch. Times are
in seconds where --cost-alpha, --cost-beta and --cost-gamma come from `fit-cost`.
"""
EXAMPLES = """\
  megatron-dynbatch plan --rollouts DIR --max-tokens-per-gpu 8192 --dp 8 --rollouts-per-step 64
  megatron-dynbatch plan --lengths lengths.jsonl --max-tokens-per-gpu 16384 --dp 4 --pp 2
  megatron-dynbatch plan --distribution C --num-samples 512 --agentic --dp 8 --cp 2 --json
  megatron-dynbatch plan --distribution C --agentic --dp 4 --pp 2 --plot plan.png --step 0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    _add_input(parser)
    _add_layout(parser)
    _add_options(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="figures as JSON, not as a table")
    output.add_argument("--plan-json", type=Path, metavar="FILE", help="write the plan itself")
    output.add_argument("--plot", type=Path, metavar="PNG", help="ranks × time, as a picture")
    output.add_argument("--step", type=int, default=0, help="the step to plot")


def _add_input(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--rollouts", type=Path, metavar="DIR", help="a rollout directory")
    source.add_argument("--lengths", type=Path, metavar="FILE", help="Parquet or JSONL of lengths")
    source.add_argument("--distribution", choices=DISTRIBUTIONS, help="a named distribution")
    group.add_argument("--batch", type=int, help="of the directory; default: the first one kept")
    group.add_argument("--num-samples", type=int, default=256)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--agentic", action="store_true", help="several samples per rollout")


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    for name in ("dp", "cp", "tp", "pp", "vpp", "ep"):
        group.add_argument(f"--{name}", type=int, default=1)
    group.add_argument("--vpp-group", type=int, help="micro-batches in turn per model chunk")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--fp8", choices=("fp8", "mxfp8"))


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    group.add_argument("--max-tokens-per-gpu", type=int, help="default: the distribution's own")
    group.add_argument("--micro-batch-size", type=int, help="static micro-batches, no token cap")
    group.add_argument("--rollouts-per-step", type=int, help="default: the batch is one step")
    group.add_argument("--loss-reduction", choices=LOSS_REDUCTIONS, default="rollout")
    group.add_argument("--loss-constant", type=float)
    group.add_argument("--leftover", choices=LEFTOVER_POLICIES, default="partial")
    group.add_argument("--empty-rollouts", choices=EMPTY_ROLLOUT_POLICIES, default="count")
    group.add_argument("--oversize", choices=OVERSIZE_POLICIES, default="error")
    group.add_argument("--fixed-width", action="store_true")
    group.add_argument("--step-splitter", default="rollouts", metavar="NAME|PKG.MOD:FN")
    group.add_argument("--tokens-per-step", type=int)
    group.add_argument("--max-logits-per-gpu", type=int, help="response rows · vocabulary / tp")
    group.add_argument("--vocab-size", type=int)
    group.add_argument("--order", choices=ORDERS, default="auto")
    cost = CostModel()
    group.add_argument("--cost-alpha", type=float, default=cost.alpha, help="per token")
    group.add_argument("--cost-beta", type=float, default=cost.beta, help="per token squared")
    group.add_argument("--cost-gamma", type=float, default=cost.gamma, help="per micro-batch")
    group.add_argument("--cost-function", metavar="PKG.MOD:FN")


def run(args: argparse.Namespace) -> int:
    """Plan the batch and show what came out."""
    index = read_index(args)
    with options_as_typed(COMMAND_FLAGS):
        layout = _layout(args)
        options = _options(args, layout)
    start = time.perf_counter()
    with options_as_typed(COMMAND_FLAGS):
        plan = make_plan(index, layout, options)
    took = time.perf_counter() - start
    plan.check()
    steps = summarize(plan)
    if args.plan_json is not None:
        args.plan_json.write_text(plan.to_json(), encoding="utf-8")
    if args.plot is not None:
        _plot(plan, steps, args.step, args.plot)
    if args.json:
        print(json.dumps(_as_json(plan, steps, took), indent=1))
    else:
        _print_table(plan, steps, took, time_unit(args))
    return 0


def time_unit(args: argparse.Namespace) -> str:
    """What predicted times are in: seconds where a fitted cost model was given."""
    if args.cost_function is not None:
        return "cost"
    default = CostModel()
    given = args.cost_alpha, args.cost_beta, args.cost_gamma
    return "tokens" if given == (default.alpha, default.beta, default.gamma) else "s"


def _layout(args: argparse.Namespace) -> ParallelLayout:
    return ParallelLayout(
        dp=args.dp,
        cp=args.cp,
        tp=args.tp,
        pp=args.pp,
        vpp=args.vpp,
        vpp_group=args.vpp_group,
        ep=args.ep,
        sequence_parallel=args.sequence_parallel,
        fp8=args.fp8,
    )


def _options(args: argparse.Namespace, layout: ParallelLayout) -> PlanOptions:
    cap = args.max_tokens_per_gpu
    if cap is None and args.micro_batch_size is None and args.distribution is not None:
        cap = DISTRIBUTIONS[args.distribution].capacity // layout.cp
    return PlanOptions(
        max_tokens_per_gpu=cap,
        micro_batch_size=args.micro_batch_size,
        rollouts_per_step=args.rollouts_per_step,
        loss_reduction=args.loss_reduction,
        loss_constant=args.loss_constant,
        leftover=args.leftover,
        empty_rollouts=args.empty_rollouts,
        oversize=args.oversize,
        fixed_width=args.fixed_width,
        step_splitter=args.step_splitter,
        tokens_per_step=args.tokens_per_step,
        max_logits_per_gpu=args.max_logits_per_gpu,
        vocab_size=args.vocab_size,
        order=args.order,
        cost=CostModel(
            alpha=args.cost_alpha,
            beta=args.cost_beta,
            gamma=args.cost_gamma,
            function=args.cost_function,
        ),
    )


def _as_json(plan: Plan, steps: list[StepSummary], took: float) -> dict[str, Any]:
    return {
        "fingerprint": plan.fingerprint,
        "planning_seconds": took,
        "layout": plan.layout.to_dict(),
        "options": plan.options.to_dict(),
        "steps": [step.to_dict() for step in steps],
        "carried": len(plan.carried),
        "dropped": len(plan.dropped),
        "oversize": len(plan.oversize),
    }


def _print_table(plan: Plan, steps: list[StepSummary], took: float, unit: str) -> None:
    head = (
        f"{'step':>4} {'rollouts':>8} {'samples':>8} {'tokens':>11} {'M (bound)':>11} "
        f"{'fill':>6} {'balance':>8} {'lock-step':>9} {'dummies':>7} {'oversize':>8} "
        f"{f'time ({unit})':>13} {'bubble':>7}"
    )
    print(head)
    for step in steps:
        count = f"{step.num_microbatches} ({step.fewest_microbatches})"
        fill = f"{step.fill:.1%}" if step.fill else "-"
        print(
            f"{step.step:>4} {step.num_rollouts:>8} {step.num_samples:>8} {step.num_tokens:>11,} "
            f"{count:>11} {fill:>6} {step.balance:>8.4f} {step.lockstep:>9.4f} "
            f"{step.num_dummies:>7} {step.num_oversize:>8} {_time(plan, step, unit):>13} "
            f"{step.bubble:>7.1%}"
        )
    left = [
        f"{counted(len(rows), 'sample')} {word}"
        for rows, word in ((plan.carried, "kept for the next batch"), (plan.dropped, "dropped"))
        if rows
    ]
    print(f"planned in {took * 1e3:.0f} ms" + "".join(f"; {words}" for words in left))
    if unit == "tokens":
        print("time: as long as so many tokens take without attention; seconds: fit-cost")


def _time(plan: Plan, step: StepSummary, unit: str) -> str:
    if unit == "tokens":
        return f"{step.seconds / plan.options.cost.alpha:,.0f}"
    return f"{step.seconds:,.0f}" if step.seconds >= 10_000 else f"{step.seconds:.4g}"


def _plot(plan: Plan, steps: list[StepSummary], number: int, path: Path) -> None:
    if not 0 <= number < len(steps):
        raise OptionError(f"--step {number}: the plan has {counted(len(steps), 'step')}, from 0")
    try:
        from megatron_dynbatch.cli.plan_plot import draw_step
    except ImportError as error:
        raise ValueError(
            f"--plot needs matplotlib: pip install 'megatron-dynbatch[plot]' ({error})"
        ) from error
    draw_step(plan, steps[number], path)
    print(f"wrote {path}", file=sys.stderr)

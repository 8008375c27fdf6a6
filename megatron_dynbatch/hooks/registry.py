"""Every place in Megatron that the plugin touches, in one table.

Named sites are expressions (see `sites`); seams are functions that are wrapped (see `seams`).
Numbers of matches are those of megatron-core 0.14 (fewer consumed-sample sites) to 0.19.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable

from megatron_dynbatch.hooks.arguments import adding_arguments
from megatron_dynbatch.hooks.balance import (
    applying_balance_loss,
    applying_sequence_loss,
    routing_counted,
)
from megatron_dynbatch.hooks.calculator import building_calculator
from megatron_dynbatch.hooks.checkpoint import loaded_samples
from megatron_dynbatch.hooks.data_iterator import building_iterators
from megatron_dynbatch.hooks.flops import consuming_lengths
from megatron_dynbatch.hooks.loss import getting_forward_backward
from megatron_dynbatch.hooks.routers import (
    applying_global_loss,
    attaching_loss,
    counting_experts,
    tracking_moe,
    tracking_mtp,
    weighting_z_loss,
)
from megatron_dynbatch.hooks.seams import Seam, seams_out_of_place
from megatron_dynbatch.hooks.sites import Site, SiteError, sites_out_of_place
from megatron_dynbatch.hooks.step_boundary import (
    advance_lr,
    change_count,
    finish_step,
    log_step,
    open_step,
)
from megatron_dynbatch.hooks.version import AUX_LOSSES_SINCE, core_version

_TRAINING = "megatron.training.training"
_CHECKPOINTING = "megatron.training.checkpointing"
_ROUTER = "megatron.core.transformer.moe.router"


def _factors(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _factors(node.left) + _factors(node.right)
    return [node]


def is_sample_product(node: ast.expr) -> bool:
    """A product of the micro-batch count, the micro-batch size and data-parallel sizes."""
    if not isinstance(node, ast.BinOp):
        return False
    factors = {ast.unparse(factor) for factor in _factors(node)}
    return {"get_num_microbatches()", "args.micro_batch_size"} <= factors


def _is(source: str) -> Callable[[ast.expr], bool]:
    kind = type(ast.parse(source, mode="eval").body)
    # Turning an expression back into source is slow, and a function has thousands of them.
    return lambda node: isinstance(node, kind) and ast.unparse(node) == source


_LM = "github.com/NVIDIA/Megatron-LM"
_PLAN_OF_A_STEP = f"`train` asks an object for its steps (in the spirit of {_LM}/issues/4590)"
_TERM_WEIGHTS = f"router losses take a weight per micro-batch (see {_LM}/issues/4590)"
_DATASET = "stock `get_batch` takes the source of its batches from a provider"

SITES = (
    Site("scheduler increment", _TRAINING, "train_step", is_sample_product, (1,), advance_lr,
         why="it counts micro-batches, so LR and weight decay drift with the packing",
         until=_PLAN_OF_A_STEP),
    Site("logged batch size", _TRAINING, "training_log", is_sample_product, (1,), log_step,
         why="it counts micro-batches, and is the moment when a step's losses are known",
         until=_PLAN_OF_A_STEP),
    Site("consumed samples", _TRAINING, "train", is_sample_product, (2, 3), finish_step,
         why="it counts micro-batches, also of a step whose update is skipped",
         until=_PLAN_OF_A_STEP),
    Site("micro-batch count check", _TRAINING, "train",
         _is("get_num_microbatches() != num_microbatches"), (1,), change_count,
         why="the number may only grow, and each change saves a checkpoint",
         until=f"a batch-size schedule may shrink (schedules: {_LM}/pull/4411)"),
    Site("loop condition", _TRAINING, "train", _is("iteration < args.train_iters"), (1,),
         open_step,
         why="nobody knows the number of steps before the last rollout is written",
         until=_PLAN_OF_A_STEP),
    Site("consumed samples loaded", _CHECKPOINTING, "load_checkpoint",
         _is("getattr(checkpoint_args, 'consumed_train_samples', 0)"), (1,), loaded_samples,
         why="the cursor of a checkpoint is in its arguments, which Megatron reads only here",
         until="checkpoints carry state of plugins"),
)


def check_in_place() -> None:
    """Make sure, when a run begins, that everything that was hooked still is.

    Raises:
        SiteError: Names what was replaced or loaded again after `install`.
    """
    lines = sites_out_of_place(SITES) + seams_out_of_place(present_seams())
    if lines:
        raise SiteError(
            "hooks were lost after megatron_dynbatch.install():\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\ncall install() after everything that reloads or replaces parts of Megatron, or "
            "let the other plugin wrap what it finds"
        )


SEAMS = (
    Seam("megatron.training.arguments", "add_megatron_arguments", adding_arguments,
         why="flags must be known to every script, also to one without an extra-arguments provider",
         until="Megatron finds arguments of installed plugins"),
    Seam("megatron.core.num_microbatches_calculator", "_build_num_microbatches_calculator",
         functools.partial(building_calculator, check=check_in_place),
         why="its calculators go by consumed samples, ours by the open step",
         until=f"a calculator can be handed in (schedules: {_LM}/pull/4411)"),
    Seam(_TRAINING, "build_train_valid_test_data_iterators", building_iterators,
         why="training data come from the rollouts; evaluation data stay the script's",
         until=_DATASET),
    Seam(_TRAINING, "get_forward_backward_func", getting_forward_backward,
         why="the schedule divides each micro-batch's loss by M and its own token count",
         until=f"a schedule takes the weight of each micro-batch (see {_LM}/issues/4590)"),
    Seam(_TRAINING, "consume_seqlen_stats_in_iteration", consuming_lengths,
         why="FLOPs are counted over padded lengths",
         until="scripts count lengths without padding", since=(0, 18)),
    Seam(_ROUTER, "z_loss_func", weighting_z_loss,
         why="it is the mean of the ranks' means, whose tokens without padding differ in number",
         until=_TERM_WEIGHTS, since=AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter.attach_and_log_load_balancing_loss", attaching_loss,
         why="per-token loss counts the tokens of all TP·CP ranks, and multiplies by TP·CP again",
         until=f"the count is that of the rank (scaling: {_LM}/pull/5047)", since=AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter._apply_expert_bias", counting_experts,
         why="dummies would count, and a padding mask of [tokens] fails",
         until=f"padding is left out on every path ({_LM}/pull/2121)", since=AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter._apply_global_aux_loss", applying_global_loss,
         why="a dummy would enter its running counts",
         until=f"{_LM}/pull/7214", since=AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter._apply_seq_aux_loss", applying_sequence_loss,
         why="a pack counts as one sequence",
         until=f"{_LM}/pull/6115", since=AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter._apply_aux_loss", applying_balance_loss,
         why="frequencies of one micro-batch depend on the packing (`--moe-balance`)",
         until="load balancing over a whole step", since=AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter.routing", routing_counted,
         why="a forward-only pass counts experts for `--moe-balance same-step`",
         until="load balancing over a whole step", since=AUX_LOSSES_SINCE),
    Seam("megatron.core.transformer.moe.moe_logging", "MoEMetricsTracker.record", tracking_moe,
         why="log lines would show a mean over micro-batches of unequal size",
         until=_TERM_WEIGHTS, since=AUX_LOSSES_SINCE),
    Seam("megatron.core.transformer.multi_token_prediction",
         "MTPLossLoggingHelper.save_metrics_to_tracker", tracking_mtp,
         why="log lines would show a mean over micro-batches of unequal size",
         until="MTP's loss takes a weight per micro-batch", since=AUX_LOSSES_SINCE),
)


def present_seams() -> tuple[Seam, ...]:
    """The seams that the installed version of megatron-core has."""
    return tuple(seam for seam in SEAMS if core_version() >= seam.since)

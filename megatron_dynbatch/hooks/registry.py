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
from megatron_dynbatch.hooks.checkpoint import loaded_samples
from megatron_dynbatch.hooks.data_iterator import building_iterators
from megatron_dynbatch.hooks.flops import consuming_lengths
from megatron_dynbatch.hooks.loss import getting_forward_backward
from megatron_dynbatch.hooks.microbatches import (
    building_calculator,
    consumed_samples,
    count_changed,
    loop_condition,
)
from megatron_dynbatch.hooks.report import logged_batch_size
from megatron_dynbatch.hooks.routers import (
    applying_global_loss,
    attaching_loss,
    counting_experts,
    tracking_moe,
    tracking_mtp,
    weighting_z_loss,
)
from megatron_dynbatch.hooks.scheduler import scheduler_increment
from megatron_dynbatch.hooks.seams import Seam, seams_out_of_place
from megatron_dynbatch.hooks.sites import Site, SiteError, sites_out_of_place
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


SITES = (
    Site("scheduler increment", _TRAINING, "train_step", is_sample_product, (1,),
         scheduler_increment),
    Site("logged batch size", _TRAINING, "training_log", is_sample_product, (1,),
         logged_batch_size),
    Site("consumed samples", _TRAINING, "train", is_sample_product, (2, 3), consumed_samples),
    Site("micro-batch count check", _TRAINING, "train",
         _is("get_num_microbatches() != num_microbatches"), (1,), count_changed),
    Site("loop condition", _TRAINING, "train", _is("iteration < args.train_iters"), (1,),
         loop_condition),
    Site("consumed samples loaded", _CHECKPOINTING, "load_checkpoint",
         _is("getattr(checkpoint_args, 'consumed_train_samples', 0)"), (1,), loaded_samples),
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
    Seam("megatron.training.arguments", "add_megatron_arguments", adding_arguments),
    Seam("megatron.core.num_microbatches_calculator", "_build_num_microbatches_calculator",
         functools.partial(building_calculator, check=check_in_place)),
    Seam(_TRAINING, "build_train_valid_test_data_iterators", building_iterators),
    Seam(_TRAINING, "get_forward_backward_func", getting_forward_backward),
    Seam(_TRAINING, "consume_seqlen_stats_in_iteration", consuming_lengths, since=(0, 18)),
    Seam(_ROUTER, "z_loss_func", weighting_z_loss, AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter.attach_and_log_load_balancing_loss", attaching_loss,
         AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter._apply_expert_bias", counting_experts, AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter._apply_global_aux_loss", applying_global_loss, AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter._apply_seq_aux_loss", applying_sequence_loss, AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter._apply_aux_loss", applying_balance_loss, AUX_LOSSES_SINCE),
    Seam(_ROUTER, "TopKRouter.routing", routing_counted, AUX_LOSSES_SINCE),
    Seam("megatron.core.transformer.moe.moe_logging", "MoEMetricsTracker.record", tracking_moe,
         AUX_LOSSES_SINCE),
    Seam("megatron.core.transformer.multi_token_prediction",
         "MTPLossLoggingHelper.save_metrics_to_tracker", tracking_mtp, AUX_LOSSES_SINCE),
)


def present_seams() -> tuple[Seam, ...]:
    """The seams that the installed version of megatron-core has."""
    return tuple(seam for seam in SEAMS if core_version() >= seam.since)

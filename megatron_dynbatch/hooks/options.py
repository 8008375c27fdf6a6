"""What a training was asked for: Megatron's arguments and the plugin's, read once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan import PlanOptions
from megatron_dynbatch.steps.announce import Staleness

# Rollouts that no run trains: Megatron wants a number where the total is not known.
UNBOUNDED = 10**12

_OF_ONE_RANK = ("rank", "local_rank", "step_report", "rollout_ledger")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """The options of a run, which never change; `LiveArgs` has what does.

    Attributes:
        layout: The parallel layout.
        plan: How rollouts become steps and micro-batches.
        global_batch_size: Rollouts of a full step.
        micro_batch_size: Sequences of a micro-batch as Megatron sees them.

        counts_rollouts: Whether training ends after rollouts (or at END), not after iterations.
        train_samples: After how many rollouts; None: at END, or after iterations.
        train_iters: After how many iterations, where it counts them.
        lr_horizon: Rollouts until the LR schedule ends; None: it is constant.

        rollout_path: Where rollouts come from.
        staleness: Which of them are too old.
        batch_timeout: Seconds to wait for a batch.
        agreement_timeout: Seconds that ranks wait for each other.
        wait_for_path: Whether the path is waited for like a batch.
        max_empty_batches: Batches in a row that may train nothing.
        keep_batches: Batches that are kept behind a completed checkpoint; None: all.
        rollout_ledger: File of the rollouts of each step, or None.
        rollouts_moved: Whether they may lie elsewhere than when the checkpoint was saved.
        on_batch_needed: `package.module:function`, or None.
        on_batch_opened: Likewise.

        load: Folder of checkpoints to resume from, or None.
        save: Folder to save them in, or None.
        evaluates: Whether there is evaluation at all.
        gathers_late: Whether parameters are gathered only in the forward pass.

        num_layers: Layers of the model, without those of MTP.
        num_experts: E; 0: the model is dense.
        moe_router_topk: K.
        mtp_num_layers: Depths of multi-token prediction.
        moe_balance: Whose expert frequencies the load-balancing loss takes.
        per_token_loss: Whether Megatron divides gradients by the number of tokens.
        stops_at_non_finite: Whether a loss that is not finite ends the run.
        admitted: Traits that are trained without a parity test.

        step_report: File of the step reports, or None.
        step_progress: How progress is shown.
        tensorboard_log_interval: Iterations between two entries.
    """

    layout: ParallelLayout
    plan: PlanOptions
    global_batch_size: int
    micro_batch_size: int

    counts_rollouts: bool
    train_samples: int | None
    train_iters: int | None
    lr_horizon: int | None

    rollout_path: str
    staleness: Staleness
    batch_timeout: float
    agreement_timeout: float
    wait_for_path: bool
    max_empty_batches: int
    keep_batches: int | None
    rollout_ledger: str | None
    rollouts_moved: bool
    on_batch_needed: str | None
    on_batch_opened: str | None

    load: Path | None
    save: Path | None
    evaluates: bool
    gathers_late: bool

    num_layers: int
    num_experts: int
    moe_router_topk: int
    mtp_num_layers: int
    moe_balance: str
    per_token_loss: bool
    stops_at_non_finite: bool
    admitted: frozenset[str]

    step_report: str | None
    step_progress: str
    tensorboard_log_interval: int

    @property
    def has_aux_losses(self) -> bool:
        """Whether the model has auxiliary losses at all."""
        return bool(self.num_experts or self.mtp_num_layers)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> TrainingOptions:
        """Those of arguments that Megatron has validated.

        Raises:
            PlanError, OptionError: One of them is wrong by itself.
        """
        known_total = args.train_samples and args.train_samples != UNBOUNDED
        return cls(
            layout=_layout(args),
            plan=_plan_options(args),
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            counts_rollouts=bool(args.train_samples),
            train_samples=args.train_samples if known_total else None,
            train_iters=None if args.train_samples else args.train_iters,
            lr_horizon=_lr_horizon(args),
            rollout_path=args.rollout_path,
            staleness=Staleness(args.max_staleness, args.stale_rollouts),
            batch_timeout=args.batch_timeout,
            agreement_timeout=args.agreement_timeout,
            wait_for_path=args.wait_for_path,
            max_empty_batches=args.max_empty_batches,
            keep_batches=args.keep_batches,
            rollout_ledger=args.rollout_ledger,
            rollouts_moved=args.rollouts_moved,
            on_batch_needed=args.on_batch_needed,
            on_batch_opened=args.on_batch_opened,
            load=Path(args.load) if args.load else None,
            save=Path(args.save) if args.save else None,
            evaluates=bool(args.eval_iters or getattr(args, "full_validation", False)),
            gathers_late=args.use_distributed_optimizer and args.overlap_param_gather,
            num_layers=args.num_layers or 0,
            num_experts=args.num_experts or 0,
            moe_router_topk=args.moe_router_topk,
            mtp_num_layers=args.mtp_num_layers or 0,
            moe_balance=args.moe_balance,
            per_token_loss=args.calculate_per_token_loss,
            stops_at_non_finite=(
                args.check_for_nan_in_loss_and_grad and args.rerun_mode == "disabled"
            ),
            admitted=frozenset(args.admit_unproven or ()),
            step_report=args.step_report,
            step_progress=args.step_progress,
            tensorboard_log_interval=getattr(args, "tensorboard_log_interval", 1),
        )


def facts_from_args(args: argparse.Namespace) -> dict[str, str]:
    """Flag → value of all that must be the same on every rank.

    Files and directories may have other names on another machine; what is read there is compared.
    """
    shown = {name: repr(value) for name, value in sorted(vars(args).items())}
    return {
        f"--{name.replace('_', '-')}": text
        for name, text in shown.items()
        if name not in _OF_ONE_RANK
        and not name.endswith(("_path", "_dir", "_file"))
        and " at 0x" not in text  # an object of the script's own, shown by its address
    }


def _layout(args: argparse.Namespace) -> ParallelLayout:
    fp8 = None
    if getattr(args, "fp8", None):
        fp8 = "mxfp8" if args.fp8_recipe == "mxfp8" else "fp8"
    return ParallelLayout(
        dp=args.data_parallel_size,
        cp=args.context_parallel_size,
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        vpp=args.virtual_pipeline_model_parallel_size or 1,
        vpp_group=args.microbatch_group_size_per_vp_stage
        if args.virtual_pipeline_model_parallel_size
        else None,
        ep=args.expert_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        fp8=fp8,
    )


def _plan_options(args: argparse.Namespace) -> PlanOptions:
    per_step = args.rollouts_per_step
    return PlanOptions(
        max_tokens_per_gpu=args.max_tokens_per_gpu,
        rollouts_per_step=None if per_step == "batch" else per_step,
        loss_reduction=args.loss_reduction,
        loss_constant=args.loss_constant,
        leftover=args.leftover,
        empty_rollouts=args.empty_rollouts,
        oversize=args.oversize,
        fixed_width=args.micro_batch_width == "fixed",
        step_splitter=args.step_splitter,
        tokens_per_step=args.tokens_per_step,
        order=args.micro_batch_order,
    )


def _lr_horizon(args: argparse.Namespace) -> int | None:
    """As Megatron's scheduler counts it, which is built later."""
    if args.lr_decay_style == "constant":
        return None
    if args.lr_decay_samples is not None:
        return int(args.lr_decay_samples)
    if args.train_samples:
        return int(args.train_samples)
    iterations = args.train_iters if args.lr_decay_iters is None else args.lr_decay_iters
    return int(iterations * args.global_batch_size)

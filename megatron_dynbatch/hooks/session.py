"""State of one training run under the plugin: step feed, open step, current micro-batch.

There is at most one session in a process. It is made when Megatron builds its micro-batch
calculator with the flag on, and replaced when that happens again (in-process restart, a second
training in one process).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from megatron_dynbatch.hooks.horizon import HorizonWarning
from megatron_dynbatch.hooks.live_args import LiveArgs
from megatron_dynbatch.hooks.options import TrainingOptions, facts_from_args
from megatron_dynbatch.hooks.progress import step_progress
from megatron_dynbatch.hooks.rendezvous import install_rendezvous, uninstall_rendezvous
from megatron_dynbatch.hooks.resume import check_batches
from megatron_dynbatch.hooks.tracker import completed_iteration
from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.report import StepReportWriter
from megatron_dynbatch.rollouts import open_transport
from megatron_dynbatch.steps import Cursor, Exchange, FeedConfig, Step, StepFeed
from megatron_dynbatch.steps.ledger import Ledger

_numbers = itertools.count()


class Session:
    """What the hooks share.

    Args:
        args: Megatron's validated arguments, with the plugin's flag on.

    Attributes:
        options: What they ask for.
        live_args: What changes among them.
        layout: That of the options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.options = TrainingOptions.from_args(args)
        self.live_args = LiveArgs(args)
        self.layout = self.options.layout
        self.number = next(_numbers)
        self.step: Step | None = None
        self.current: MicroBatch | None = None
        self.current_index = 0
        self.has_first_batch = False  # see `first_batch`
        self.mtp_tokens = 0
        self.aux_scales: dict[int, Any] = {}  # of the open step, see `aux_loss`
        self.samples_of_tokens: dict[int, Any] = {}  # of the open step, see `balance`
        self.balance: Any = None  # expert frequencies of a step, see `balance`
        self.model_checked = False
        self.counting = False  # whether a forward-only pass counts them
        self.loss_sums: list[tuple[MicroBatch, torch.Tensor]] = []
        self.grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.writer: StepReportWriter | None = None
        self._progress = step_progress(self.options)
        self._feed: StepFeed | None = None
        self._restored: Cursor | None = None
        self._cursors: dict[int, Cursor] = {}
        self._completed_before: int | None = None
        self._is_checked = False

    @cached_property
    def horizon(self) -> HorizonWarning | None:
        """On rank 0: looks whether the LR schedule is as long as the training."""
        feed = self.feed
        return HorizonWarning(self.options, feed.source) if feed.exchange.rank == 0 else None

    @property
    def feed(self) -> StepFeed:
        """The step feed; made at first use, when torch.distributed is up."""
        if self._feed is None:
            self._feed = self._make_feed()
            if self._restored is not None:
                self._feed.restore(self._restored)
        return self._feed

    def _make_feed(self) -> StepFeed:
        from megatron.core import mpu
        from megatron.training import get_tokenizer

        options = self.options
        stage, num_stages = (
            mpu.get_pipeline_model_parallel_rank(),
            mpu.get_pipeline_model_parallel_world_size(),
        )
        return StepFeed(
            open_transport(options.rollout_path, vocab_size=get_tokenizer().vocab_size),
            options.layout,
            options.plan,
            FeedConfig(
                dp_rank=mpu.get_data_parallel_rank(),
                cp_rank=mpu.get_context_parallel_rank(),
                batch_timeout=options.batch_timeout,
                # Where tensors for the GPU are; on the CPU runner that is the CPU.
                device=torch.empty(0, device=torch.cuda.current_device()).device,
                # The loss, which reads advantages and log-probs, is on the last stage.
                fields=None if stage == num_stages - 1 else (),
                lengths_only=0 < stage < num_stages - 1 and not options.mtp_num_layers,
                staleness=options.staleness,
                wait_for_path=options.wait_for_path,
                max_empty_batches=options.max_empty_batches,
                keep_batches=options.keep_batches,
                job_facts=facts_from_args(self.args),
                rollouts_moved=options.rollouts_moved,
            ),
            exchange=Exchange.of_job(timeout=options.agreement_timeout, name="training"),
            ledger=Ledger(options.rollout_ledger) if options.rollout_ledger else None,
        )

    def at_step_boundary(self, iteration: int) -> None:
        """Note where a checkpoint of this iteration stands, and learn of completed ones.

        Megatron names the last completed checkpoint, saved asynchronously or not, in one file,
        which rank 0 alone looks at.

        Raises:
            ResumeError: At the first one, on every rank: batches that training needs were deleted.
        """
        if not self._is_checked:
            check_batches(self.feed, self.options)
            self._is_checked = True
        folder = self.options.save
        if self.options.keep_batches is None or folder is None or self.feed.exchange.rank:
            return
        self._cursors[iteration] = self.feed.cursor
        completed = completed_iteration(folder)
        if self._completed_before is None:
            self._completed_before = completed
        # What stood there before may be of a run that came to this iteration by other batches.
        if completed != self._completed_before and completed in self._cursors:
            self.feed.checkpoint_completed(self._cursors[completed])
            self._cursors = {i: c for i, c in self._cursors.items() if i > completed}

    def close(self) -> None:
        """End the threads of the run, and its progress line."""
        if self._progress is not None:
            self._progress.clear()
        if self._feed is not None:
            self._feed.close()

    def restore(self, cursor: Cursor) -> None:
        """Continue at the cursor of a checkpoint that was loaded."""
        self._restored = cursor
        if self._feed is not None:
            self._feed.restore(cursor)

    def select(self, k: int) -> MicroBatch:
        """Make micro-batch ``k`` of the open step the current one."""
        assert self.step is not None, "a training step runs but none is open"
        if self._progress is not None:
            self._progress.begin_micro_batch(self.step)
        self.current, self.current_index = self.step.micro_batch(k), k
        return self.current


_session: Session | None = None


def start_session(args: argparse.Namespace) -> Session:
    """Begin a run; whatever an earlier run left is forgotten."""
    global _session
    end_session()
    _session = Session(args)
    install_rendezvous()  # the process group is made after the arguments are known
    return _session


def end_session() -> None:
    """Forget the run, if there is one."""
    global _session
    if _session is not None:
        _session.close()
    _session = None
    uninstall_rendezvous()


def session() -> Session | None:
    """The run in this process, or None while the flag is off."""
    return _session


def current() -> MicroBatch:
    """The micro-batch whose forward pass runs now on this rank.

    Raises:
        RuntimeError: No training step runs under the plugin.
    """
    if _session is None or _session.current is None:
        raise RuntimeError(
            "megatron_dynbatch.current() has an answer only inside a training step's forward "
            "pass, with --dynamic-global-batch"
        )
    return _session.current

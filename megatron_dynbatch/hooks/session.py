"""State of one training run under the plugin: step feed, open step, current micro-batch.

There is at most one session in a process. It is made when Megatron builds its micro-batch
calculator with the flag on, and replaced when that happens again (in-process restart, a second
training in one process).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch

from megatron_dynbatch.hooks.arguments import layout_from_args, options_from_args, source_from_args
from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.report import StepReportWriter
from megatron_dynbatch.steps import Cursor, Exchange, Step, StepFeed

_numbers = itertools.count()


class Session:
    """What the hooks share.

    Args:
        args: Megatron's validated arguments, with the plugin's flag on.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.layout = layout_from_args(args)
        self.options = options_from_args(args)
        self.number = next(_numbers)
        self.step: Step | None = None
        self.current: MicroBatch | None = None
        self.current_index = 0
        self.mtp_tokens = 0
        self.grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.writer: StepReportWriter | None = None
        self._feed: StepFeed | None = None
        self._restored: Cursor | None = None

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

        args = self.args
        return StepFeed(
            source_from_args(args, vocab_size=get_tokenizer().vocab_size),
            self.layout,
            self.options,
            dp_rank=mpu.get_data_parallel_rank(),
            cp_rank=mpu.get_context_parallel_rank(),
            exchange=Exchange.of_job(timeout=args.agreement_timeout, name=str(self.number)),
            batch_timeout=args.batch_timeout,
            device=torch.device("cuda", torch.cuda.current_device()),
        )

    def restore(self, cursor: Cursor) -> None:
        """Continue at the cursor of a checkpoint that was loaded."""
        self._restored = cursor
        if self._feed is not None:
            self._feed.restore(cursor)

    def select(self, k: int) -> MicroBatch:
        """Make micro-batch ``k`` of the open step the current one."""
        assert self.step is not None, "a training step runs but none is open"
        self.current, self.current_index = self.step.micro_batch(k), k
        return self.current


_session: Session | None = None


def start_session(args: argparse.Namespace) -> Session:
    """Begin a run; whatever an earlier run left is forgotten."""
    global _session
    _session = Session(args)
    return _session


def end_session() -> None:
    """Forget the run, if there is one."""
    global _session
    _session = None


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

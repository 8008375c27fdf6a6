"""The step feed: rollouts and plans, handed to every rank one step at a time."""

import megatron_dynbatch._torch  # noqa: F401
from megatron_dynbatch.steps.announce import Staleness
from megatron_dynbatch.steps.config import FeedConfig
from megatron_dynbatch.steps.cursor import Cursor
from megatron_dynbatch.steps.exchange import Exchange, RankFailure
from megatron_dynbatch.steps.feed import StepFeed
from megatron_dynbatch.steps.forward_only import run_forward_only, with_fields
from megatron_dynbatch.steps.loaded_batch import LoadedBatch
from megatron_dynbatch.steps.next_batch import BatchTimeout
from megatron_dynbatch.steps.step import Step

__all__ = [
    "BatchTimeout",
    "Cursor",
    "Exchange",
    "FeedConfig",
    "LoadedBatch",
    "RankFailure",
    "Staleness",
    "Step",
    "StepFeed",
    "run_forward_only",
    "with_fields",
]

"""The step feed: rollouts and plans, handed to every rank one step at a time."""

from megatron_dynbatch.steps.cursor import Cursor
from megatron_dynbatch.steps.exchange import Exchange, RankFailure
from megatron_dynbatch.steps.feed import BatchTimeout, Step, StepFeed

__all__ = ["BatchTimeout", "Cursor", "Exchange", "RankFailure", "Step", "StepFeed"]

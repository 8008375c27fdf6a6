"""The one exception of this package."""

from megatron_dynbatch.errors import PlanError

__all__ = ["PlanError"]

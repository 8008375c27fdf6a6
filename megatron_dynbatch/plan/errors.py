"""The one exception of this package."""

from megatron_dynbatch.errors import DynbatchError


class PlanError(DynbatchError, ValueError):
    """A batch that cannot be planned as asked, or a plan that breaks one of its guarantees."""

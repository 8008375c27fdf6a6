"""The one exception of this package."""


class PlanError(ValueError):
    """A batch that cannot be planned as asked, or a plan that breaks one of its guarantees."""

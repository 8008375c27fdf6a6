"""The base of every error that this package raises on purpose; docs/errors.md lists them all."""


class DynbatchError(Exception):
    """Something the user or the rollout side can put right; the message says what, where and how.

    Each subclass is also a built-in exception (`ValueError`, `TimeoutError`…), so code that knows
    only those goes on working.
    """


class OptionError(DynbatchError, ValueError):
    """Options of the run that are wrong, or that do not fit together."""


class ResumeError(DynbatchError, ValueError):
    """A checkpoint that cannot be continued with these options or rollouts."""


class LossFunctionError(DynbatchError, ValueError):
    """The user's loss function, or the samples it reads, do not keep the contract."""


class BatchContractError(DynbatchError, LookupError):
    """The script asks for a batch of another kind, or hands too little of it to the model."""


class NonFiniteLossError(DynbatchError, FloatingPointError):
    """NaN or infinity in the loss at a trained token; names sample, rollout and rank."""


class MissingPackage(DynbatchError, ModuleNotFoundError):
    """A package that this part needs is not installed; the message has the pip line."""


class PlanError(DynbatchError, ValueError):
    """A batch that cannot be planned as asked, or a plan that breaks one of its guarantees."""

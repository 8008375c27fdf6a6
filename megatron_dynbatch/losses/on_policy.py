"""Whether a separate pass for old log-probs is needed at all.

Where a batch is trained in one step, the policy that starts the step *is* the old policy: the
ratio is 1 and its gradient is that of logp, so that pass may be skipped. The decision is a
function of options alone: the same on every rank, and the same for every batch of a run.
"""

from typing import Literal

from megatron_dynbatch.plan import PlanOptions

OldLogProbs = Literal["column", "current", "rollout"]


def old_log_probs_source(options: PlanOptions, *, keep_column: bool = False) -> OldLogProbs:
    """Where `policy` should take the old policy's log-probs from.

    Args:
        options: How steps are formed. One step per batch (`rollouts_per_step` None and no other
            splitter) means "current".
        keep_column: Something else needs the trainer's old log-probs as a column anyway.

    Returns:
        "current": the log-probs of this very forward pass, without gradient; no pass and no
        column. "column": the column `log_probs`.
    """
    one_step = options.rollouts_per_step is None and options.step_splitter == "rollouts"
    return "current" if one_step and not keep_column else "column"

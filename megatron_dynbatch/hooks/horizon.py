"""How long the LR schedule is, in rollouts, and a warning when that is not what will be trained.

Megatron's decay, warm-up and weight-decay schedules all advance by the rollouts of each step. The
rule for their length:

* `--train-samples N`: training ends after N rollouts; LR decays over `--lr-decay-samples`
  (default N), weight decay rises over N.
* `--train-iters K --rollouts-per-step R`: both schedules are K·R rollouts long, as if every step
  were full.
* neither, so that only the END marker ends training (online reinforcement learning): LR decays
  over `--lr-decay-samples`, which must be given unless the style is constant; weight decay is
  constant.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_dynbatch.hooks.options import TrainingOptions
from megatron_dynbatch.output import progress
from megatron_dynbatch.rollouts import RolloutDataError, RolloutSource
from megatron_dynbatch.steps import Cursor
from megatron_dynbatch.wording import counted

TOLERANCE = 0.01


class HorizonWarning:
    """Compares the length of the LR schedule with the rollouts that will be, or were, trained.

    Args:
        options: Of the run.
        source: Where rollouts come from.
        say: Gets the warning, at most once.
    """

    def __init__(
        self,
        options: TrainingOptions,
        source: RolloutSource,
        say: Callable[[str], None] = progress,
    ) -> None:
        self._options = options
        self._source = source
        self._say = say
        self._is_done = options.lr_horizon is None
        self._last_batch: int | None = None

    def at_boundary(self, iteration: int, cursor: Cursor) -> None:
        """Look at the beginning of the run, and where a batch begins; on rank 0."""
        if self._is_done or cursor.batch_id == self._last_batch:
            return
        is_first = self._last_batch is None
        self._last_batch = cursor.batch_id
        if self._options.train_iters is None:
            if is_first and (expected := self._expected(cursor)) is not None:
                self._compare(expected, "will be trained")
        elif iteration > 0 and cursor.consumed_rollouts > 0:
            expected = round(cursor.consumed_rollouts / iteration * self._options.train_iters)
            self._compare(expected, "will be trained if steps stay as they are")

    def at_end(self, cursor: Cursor) -> None:
        """Look when no step follows; on rank 0."""
        if not self._is_done:
            self._compare(cursor.consumed_rollouts, "were trained")

    def _expected(self, cursor: Cursor) -> int | None:
        """Rollouts when training ends, None if that is not known."""
        limit = self._options.train_samples
        total = cursor.consumed_rollouts if cursor.step_index == 0 else None
        batch = cursor.batch_id
        # A cursor inside a batch, or with carried rollouts, does not tell what is left of it.
        if total is None or cursor.carried:
            return limit
        try:
            while (state := self._source.state(batch)) == "present":
                total += self._source.index(batch).num_rollouts
                batch += 1
                if limit is not None and total >= limit:
                    return limit
        except RolloutDataError:
            return limit  # where the batch is opened, its damage is an error that says so
        return total if state == "end" else limit

    def _compare(self, rollouts: int, what: str) -> None:
        horizon = self._options.lr_horizon
        assert horizon is not None, "a constant rate has no horizon to compare with"
        if abs(rollouts - horizon) <= TOLERANCE * horizon:
            return
        self._is_done = True
        self._say(
            f"warning: the LR schedule is {counted(horizon, 'rollout')} long, but "
            f"{rollouts:,} {what}; set --lr-decay-samples (with --train-iters: "
            "--lr-decay-iters) if that is not meant"
        )

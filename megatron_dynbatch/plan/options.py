"""What the user chooses about a plan."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.cost import CostModel
from megatron_dynbatch.wording import short

LOSS_REDUCTIONS = ("rollout", "sample", "token", "group", "constant")
LEFTOVER_POLICIES = ("partial", "even", "carry", "drop")
EMPTY_ROLLOUT_POLICIES = ("count", "skip")
OVERSIZE_POLICIES = ("error", "alone", "drop")
ORDERS = ("auto", "heaviest_first", "lightest_first", "light_ends")


@dataclass(frozen=True)
class PlanOptions:
    """Everything that decides a plan besides the data and the layout.

    Attributes:
        max_tokens_per_gpu: Cap on the laid-out tokens of a micro-batch per GPU; a micro-batch
            holds at most this times cp. Exactly one of this and `micro_batch_size` is given.
        micro_batch_size: Static path: at most this many samples in a micro-batch, no token cap.
        rollouts_per_step: Rollouts in a step at most; None makes the whole batch one step.
        loss_reduction: One of `LOSS_REDUCTIONS`.
        loss_constant: The denominator of every sample under the reduction `constant`.
        leftover: What happens to rollouts that do not fill a last step.
        empty_rollouts: Whether a rollout, sample or group without trained token counts in B.
        oversize: What happens to a sample longer than a micro-batch may be.
        fixed_width: Every micro-batch is laid out at width max_tokens_per_gpu · cp.
        step_splitter: Name of a built-in splitter, or `package.module:function`.
        tokens_per_step: Token budget of the splitter `tokens`.
        max_logits_per_gpu: Cap on the logits that the responses of a micro-batch have on one GPU,
            in elements: rows · vocab_size / tp. Needs `vocab_size`; None is no such cap.
        vocab_size: Padded vocabulary size.
        order: Order of a rank's micro-batches, one of `ORDERS` (see `order.fastest`).
        cost: The cost model that balances ranks and micro-batches.
    """

    max_tokens_per_gpu: int | None = None
    micro_batch_size: int | None = None
    rollouts_per_step: int | None = None
    loss_reduction: str = "rollout"
    loss_constant: float | None = None
    leftover: str = "partial"
    empty_rollouts: str = "count"
    oversize: str = "error"
    fixed_width: bool = False
    step_splitter: str = "rollouts"
    tokens_per_step: int | None = None
    max_logits_per_gpu: int | None = None
    vocab_size: int | None = None
    order: str = "auto"
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        for name in (
            "max_tokens_per_gpu",
            "micro_batch_size",
            "rollouts_per_step",
            "tokens_per_step",
            "max_logits_per_gpu",
            "vocab_size",
        ):
            _check_positive(name, getattr(self, name))
        _check_choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        _check_choice("leftover", self.leftover, LEFTOVER_POLICIES)
        _check_choice("empty_rollouts", self.empty_rollouts, EMPTY_ROLLOUT_POLICIES)
        _check_choice("order", self.order, ORDERS)
        _check_choice("oversize", self.oversize, OVERSIZE_POLICIES)
        for name in ("fixed_width", "step_splitter"):
            if type(getattr(self, name)) is not (bool if name == "fixed_width" else str):
                raise PlanError(f"plan options: {name} is {short(getattr(self, name))}")
        if (self.max_tokens_per_gpu is None) == (self.micro_batch_size is None):
            raise PlanError(
                "plan options: give exactly one of max_tokens_per_gpu (dynamic micro-batches) "
                "and micro_batch_size (static), got "
                + ("neither" if self.micro_batch_size is None else "both")
            )
        if self.fixed_width and self.max_tokens_per_gpu is None:
            raise PlanError("plan options: fixed_width needs max_tokens_per_gpu")
        if self.fixed_width and self.oversize == "alone":
            raise PlanError(
                "plan options: oversize 'alone' needs micro-batches of variable width; "
                "use 'error' or 'drop' at fixed width"
            )
        if (self.max_logits_per_gpu is None) != (self.vocab_size is None):
            raise PlanError("plan options: max_logits_per_gpu and vocab_size go together")
        if self.max_logits_per_gpu is not None and self.max_tokens_per_gpu is None:
            raise PlanError("plan options: max_logits_per_gpu needs max_tokens_per_gpu")
        self._check_constant()

    def _check_constant(self) -> None:
        needs_constant = self.loss_reduction == "constant"
        if needs_constant != (self.loss_constant is not None):
            raise PlanError(
                "plan options: loss_constant goes with loss_reduction 'constant' and only with "
                f"it, got {short(self.loss_constant)} with {self.loss_reduction!r}"
            )
        constant = self.loss_constant
        if constant is None:
            return
        is_number = isinstance(constant, (int, float)) and not isinstance(constant, bool)
        if not is_number or not 0 < constant <= sys.float_info.max:
            raise PlanError(
                f"plan options: loss_constant must be finite and > 0, got {short(constant)}"
            )

    def capacity(self, layout: ParallelLayout) -> int | None:
        """Laid-out tokens that a micro-batch may hold in all; None on the static path.

        Raises:
            PlanError: The cap leaves no room for one laid-out row of tokens, or a fixed width
                is not a multiple that the layout can shard.
        """
        if self.max_tokens_per_gpu is None:
            return None
        width = self.max_tokens_per_gpu * layout.cp
        multiple = layout.micro_batch_multiple
        if width < multiple:
            raise PlanError(
                f"max_tokens_per_gpu={self.max_tokens_per_gpu} is smaller than one laid-out row: "
                f"this layout pads a micro-batch to multiples of {multiple} tokens, "
                f"{-(-multiple // layout.cp)} per GPU"
            )
        if self.fixed_width and width % multiple:
            raise PlanError(
                f"max_tokens_per_gpu={self.max_tokens_per_gpu} times cp={layout.cp} must be a "
                f"multiple of {multiple} when every micro-batch has that width"
            )
        return width // multiple * multiple

    def logit_capacity(self, layout: ParallelLayout) -> int | None:
        """Response rows of logits that a micro-batch may have per CP rank; None: no such cap.

        Raises:
            PlanError: The cap leaves no room for one row.
        """
        if self.max_logits_per_gpu is None or self.vocab_size is None:
            return None
        rows = self.max_logits_per_gpu * layout.tp // self.vocab_size
        if rows < 1:
            raise PlanError(
                f"max_logits_per_gpu={self.max_logits_per_gpu} is less than one row of "
                f"vocab_size={self.vocab_size} over tp={layout.tp}"
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `PlanOptions.from_dict` is the way back."""
        return {**self.__dict__, "cost": self.cost.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PlanOptions:
        """The options that `to_dict` wrote."""
        return cls(**{**values, "cost": CostModel(**values["cost"])})

    def without_carry(self) -> PlanOptions:
        """These options when nothing follows: what `carry` would keep is a partial last step."""
        return replace(self, leftover="partial") if self.leftover == "carry" else self


def _check_positive(name: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
        raise PlanError(
            f"plan options: {name} must be a positive int below 2^40, got {short(value)}"
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(
            f"plan options: {name} must be one of {', '.join(choices)}, got {short(value)}"
        )

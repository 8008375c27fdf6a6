"""The fused policy loss as a function of per-token tensors: formulas in `policy_reference.py`."""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dynbatch.reduce.checks import check_values
from megatron_dynbatch.reduce.ops import OPS
from megatron_dynbatch.reduce.policy_reference import METRICS, PolicyFormula
from megatron_dynbatch.reduce.segment_table import SegmentTable


def policy_loss_sums(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    w: Tensor,
    formula: PolicyFormula,
    *,
    ref_logp: Tensor | None = None,
    rollout_logp: Tensor | None = None,
    entropy: Tensor | None = None,
) -> dict[str, Tensor]:
    """Σ w·(…) of the policy loss and of each of its metrics, over this rank's tokens, in one pass.

    Args:
        logp: [T] log-probabilities under the current policy; differentiable.
        old_logp: [T] under the policy before the update.
        advantages: [T].
        w: [T] float64 token weights; 0 where the token does not count, whatever the others hold.
        formula: What the loss is made of.
        ref_logp: [T] under the reference policy; needed with a KL estimator.
        rollout_logp: [T] as the sampler reported them; needed with importance sampling.
        entropy: [T]; differentiable where it has a coefficient, which it must be given for.

    Returns:
        "loss", 0-d float64 and differentiable in logp and entropy, and the metrics of `METRICS`
        (detached). Which keys there are depends on the arguments given, never on their values.

    Raises:
        ValueError: Shapes that differ, or a missing tensor that the formula asks for.
    """
    tensors = _Tensors(logp, old_logp, advantages, ref_logp, rollout_logp, entropy)
    return _run(tensors, w, formula, None)[0]


def policy_loss_sample_sums(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    w: Tensor,
    formula: PolicyFormula,
    table: SegmentTable,
    *,
    ref_logp: Tensor | None = None,
    rollout_logp: Tensor | None = None,
    entropy: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums of `policy_loss_sums`, and those of each sample, in the same pass.

    Args:
        table: Where each sample lies; its number of tokens is T, and w is 0 outside its responses.
        logp, old_logp, advantages, w, formula, ref_logp, rollout_logp, entropy: As there.

    Returns:
        Totals (0-d) and sums of each sample on this rank (float64 [B]), with the same keys; both
        losses are differentiable.

    Raises:
        ValueError: As there, or a table of another number of tokens.
    """
    if table.num_tokens != w.shape[0]:
        raise ValueError(
            f"token weights of shape {list(w.shape)} were given for a table of "
            f"{table.num_tokens} tokens"
        )
    tensors = _Tensors(logp, old_logp, advantages, ref_logp, rollout_logp, entropy)
    return _run(tensors, w, formula, table)


class _Tensors(NamedTuple):
    """Per-token tensors [T] by the names that errors call them."""

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    ref_logp: Tensor | None
    rollout_logp: Tensor | None
    entropy: Tensor | None

    def check(self, w: Tensor, formula: PolicyFormula) -> None:
        """Raises ValueError unless all fit the weights and the formula has what it needs."""
        check_values(self.logp[None] if self.logp.dim() == 1 else self.logp, w)
        for name, tensor in self._asdict().items():
            if tensor is not None and (tensor.shape != w.shape or tensor.device != w.device):
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} on {tensor.device}, the token weights "
                    f"have shape {list(w.shape)} on {w.device}"
                )
        for name, needed in (
            ("ref_logp", formula.kl is not None),
            ("rollout_logp", formula.importance is not None),
            ("entropy", formula.entropy_coef != 0),
        ):
            if needed and getattr(self, name) is None:
                raise ValueError(f"the formula asks for {name}, but it is not given")


def _run(
    x: _Tensors, w: Tensor, formula: PolicyFormula, table: SegmentTable | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Totals, and sums of each sample if there is a table."""
    x.check(w, formula)
    segments: tuple[Tensor | None, Tensor | None, int] = (None, None, 0)
    if table is not None:
        index = table.on(w.device)
        # float64 runs in torch everywhere, which needs the index.
        needs_index = index.samples is None and x.logp.dtype == torch.float64
        samples = table.samples_on(w.device) if needs_index else index.samples
        segments = (index.pieces, samples, table.num_samples)
    old, advantages = _wide(x.old_logp.detach()), _wide(x.advantages.detach())
    ref, rollout = (t if t is None else _wide(t.detach()) for t in (x.ref_logp, x.rollout_logp))
    sums, _, per_sample = OPS.policy_loss.default(
        _wide(x.logp),
        old,
        advantages,
        w,
        ref,
        rollout,
        None if x.entropy is None else _wide(x.entropy),
        *formula.scalars(),
        *segments,
    )
    left_out = set()
    if formula.kl is None:
        left_out.add("kl")
    if formula.importance is None:
        left_out |= {"importance_weight", "importance_fraction"}
    if x.entropy is None:
        left_out.add("entropy")

    def by_name(rows: Tensor) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = dict(zip(METRICS, rows.detach().unbind(), strict=True))
        return {**{k: v for k, v in metrics.items() if k not in left_out}, "loss": rows[0]}

    return by_name(sums), {} if table is None else by_name(per_sample)


def _wide(x: Tensor) -> Tensor:
    """Contiguous, and half precision as float32, which is exact: what the kernel reads."""
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).contiguous()


__all__ = ["METRICS", "PolicyFormula", "policy_loss_sample_sums", "policy_loss_sums"]

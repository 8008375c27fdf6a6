"""The fused policy loss as a function of per-token tensors: formulas in `policy_reference.py`."""

from torch import Tensor

from megatron_dynbatch.reduce.checks import check_values
from megatron_dynbatch.reduce.ops import OPS
from megatron_dynbatch.reduce.policy_reference import METRICS, PolicyFormula


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
    check_values(logp[None] if logp.dim() == 1 else logp, w)
    tensors = {
        "logp": logp,
        "old_logp": old_logp,
        "advantages": advantages,
        "ref_logp": ref_logp,
        "rollout_logp": rollout_logp,
        "entropy": entropy,
    }
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.shape != w.shape or tensor.device != w.device):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} on {tensor.device}, the token weights have "
                f"shape {list(w.shape)} on {w.device}"
            )
    for name, needed in (
        ("ref_logp", formula.kl is not None),
        ("rollout_logp", formula.importance is not None),
        ("entropy", formula.entropy_coef != 0),
    ):
        if needed and tensors[name] is None:
            raise ValueError(f"the formula asks for {name}, but it is not given")
    sums, _ = OPS.policy_loss.default(
        logp,
        old_logp.detach(),
        advantages.detach(),
        w,
        None if ref_logp is None else ref_logp.detach(),
        None if rollout_logp is None else rollout_logp.detach(),
        entropy,
        *formula.scalars(),
    )
    left_out = set()
    if formula.kl is None:
        left_out.add("kl")
    if formula.importance is None:
        left_out |= {"importance_weight", "importance_fraction"}
    if entropy is None:
        left_out.add("entropy")
    metrics: dict[str, Tensor] = dict(zip(METRICS, sums.detach().unbind(), strict=True))
    kept = {name: value for name, value in metrics.items() if name not in left_out}
    return {**kept, "loss": sums[0]}


__all__ = ["METRICS", "PolicyFormula", "policy_loss_sums"]

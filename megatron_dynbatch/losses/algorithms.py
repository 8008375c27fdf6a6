"""The policy losses by the names of their papers: `policy` with the options that each one means.

Each takes what `policy` takes, so every option may still be changed. What a paper says about the
reduction belongs to the plan (`--loss-reduction`), what it says about advantages to
`rollouts.advantages`; both stand in the docstrings.
"""

from typing import Any

from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.losses.policy import policy
from megatron_dynbatch.report import Metric

LossAndSums = tuple[Tensor, dict[str, Tensor | Metric]]


def ppo(output: Tensor, microbatch: MicroBatch, **options: Any) -> LossAndSums:
    """PPO: x = max(−A·r, −A·clip(r, 1−0.2, 1+0.2)), arXiv:1707.06347 eq. 7.

    Advantages by `gae`; reduction `token`. REINFORCE++ (arXiv:2501.03262) is this loss with
    `whiten`ed advantages.
    """
    return policy(output, microbatch, **options)


def grpo(output: Tensor, microbatch: MicroBatch, **options: Any) -> LossAndSums:
    """GRPO: the clipped surrogate plus 0.04·k3, arXiv:2402.03300 eq. 3 and 4.

    Advantages by `group_advantages`; reduction `rollout` (`sample` where a rollout is one sample).
    """
    return policy(output, microbatch, **{"kl": "k3", "kl_coef": 0.04, **options})


def dr_grpo(output: Tensor, microbatch: MicroBatch, **options: Any) -> LossAndSums:
    """Dr. GRPO: the clipped surrogate without any length in its denominator, arXiv:2503.20783.

    Advantages by `group_advantages` with scale="none"; reduction `constant` with the longest
    response as --loss-constant.
    """
    return policy(output, microbatch, **options)


def dapo(output: Tensor, microbatch: MicroBatch, **options: Any) -> LossAndSums:
    """DAPO: clip-higher, ε_low = 0.2 and ε_high = 0.28, no KL; arXiv:2503.14476 eq. 8.

    Advantages by `group_advantages`, groups without any signal filtered by `informative_groups`;
    reduction `token`.
    """
    return policy(output, microbatch, **{"clip_high": 0.28, **options})


def cispo(output: Tensor, microbatch: MicroBatch, **options: Any) -> LossAndSums:
    """CISPO: x = −sg(clip(r, 0, 1+ε_high))·A·logp, arXiv:2506.13585 eq. 4, no lower bound.

    Advantages by `group_advantages`; reduction `token`. The paper gives no ε_high; here 2.
    """
    defaults = {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 2.0}
    return policy(output, microbatch, **{**defaults, **options})


def gspo(output: Tensor, microbatch: MicroBatch, **options: Any) -> LossAndSums:
    """GSPO: the clipped surrogate of the sequence ratio exp δ̄, arXiv:2507.18071 eq. 5 to 7.

    ε_low = 3e-4, ε_high = 4e-4 (section 5.1). Advantages by `group_advantages`; reduction `sample`.
    Needs `cp_group` under context parallelism.
    """
    defaults = {"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
    return policy(output, microbatch, **{**defaults, **options})


def gmpo(output: Tensor, microbatch: MicroBatch, **options: Any) -> LossAndSums:
    """GMPO: x = −A·exp δ̄', the geometric mean of bounded ratios, arXiv:2507.20673.

    Bounds ±0.4 in log space. Advantages by `group_advantages`; reduction `sample`.
    Needs `cp_group` under context parallelism.
    """
    defaults = {"surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.4}
    return policy(output, microbatch, **{**defaults, **options})


def reinforce(output: Tensor, microbatch: MicroBatch, **options: Any) -> LossAndSums:
    """REINFORCE: x = −A·logp, Williams, Machine Learning 8, 1992; on-policy data only.

    Advantages by `leave_one_out` (RLOO, arXiv:2402.14740) or any other baseline.
    """
    return policy(output, microbatch, **{"surrogate": "reinforce", **options})

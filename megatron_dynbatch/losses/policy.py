"""Clipped policy-gradient loss of reinforcement learning from rollouts.

The formulas and their sources stand in `reduce/policy_reference.py`; this is the loss as a function
of what the model returned and of a micro-batch's columns.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.losses.logprob import EntropyMode
from megatron_dynbatch.losses.sft import token_log_probs
from megatron_dynbatch.reduce import PolicyOptions, policy_loss_sums


def policy(
    output: Tensor,
    microbatch: MicroBatch,
    *,
    temperature: float = 1.0,
    report_entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss on the columns `log_probs` (before the update) and `advantages`.

    Args:
        output: Logits or token losses, see `token_log_probs`.
        microbatch: Gives the columns; `ref_log_probs` too with `kl`, `rollout_log_probs` with
            `tis`.
        temperature: Temperature the responses were sampled at.
        report_entropy: Report the entropy also without an entropy bonus; needs logits.
        tp_group: Tensor-parallel group of vocabulary-parallel logits.
        options: Fields of `PolicyOptions`: clip bounds, objective, KL, entropy bonus, importance
            sampling; default: PPO with ε = 0.2.

    Returns:
        l = Σ w·x, 0-d float64, and local weighted sums (detached) of "loss", "pg_loss",
        "clip_fraction", "dual_clip_fraction", "approx_kl", "ratio", "ratio_clamped", and "kl",
        "entropy", "tis", "tis_clipped" where the options have them. Which keys there are depends
        on the options alone, never on the data.

    Raises:
        ValueError: An option out of range, a column that the samples do not have, or an entropy
            without logits.
    """
    chosen = PolicyOptions(**options)
    entropy_mode: EntropyMode = "grad" if chosen.entropy_coef else "none"
    if report_entropy and not chosen.entropy_coef:
        entropy_mode = "metric"
    log_probs, entropy = token_log_probs(
        output, microbatch, temperature=temperature, entropy=entropy_mode, tp_group=tp_group
    )
    sums = policy_loss_sums(
        log_probs,
        microbatch.column("log_probs"),
        microbatch.column("advantages"),
        microbatch.token_weights,
        chosen,
        ref_logp=microbatch.column("ref_log_probs") if chosen.kl else None,
        rollout_logp=microbatch.column("rollout_log_probs") if chosen.tis else None,
        entropy=entropy,
    )
    return sums["loss"], {name: value.detach() for name, value in sums.items()}

"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.logprob import EntropyMode, vocab_parallel_logprob_entropy


def token_log_probs(
    output: Tensor,
    microbatch: MicroBatch,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, from whatever the model returned.

    Args:
        output: Token losses (one per local token, as GPTModel returns given labels), or logits as
            `vocab_parallel_logprob_entropy` takes them.
        microbatch: Gives labels and mask.

    Returns:
        logp [T_local] and entropy [T_local] (None if not asked for); 0 at masked tokens if taken
        from logits.

    Raises:
        ValueError: Temperature or entropy asked for where the model returned token losses.
    """
    if output.numel() != microbatch.num_tokens:
        return vocab_parallel_logprob_entropy(
            output,
            microbatch.labels,
            mask=microbatch.loss_mask,
            temperature=temperature,
            entropy=entropy,
            tp_group=tp_group,
        )
    if temperature != 1.0 or entropy != "none":
        raise ValueError(
            f"the model returned token losses of shape {list(output.shape)}; temperature and "
            "entropy need logits: do not pass labels to the model"
        )
    return -output.reshape(-1), None


def sft(
    output: Tensor, microbatch: MicroBatch, *, tp_group: dist.ProcessGroup | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy: x[t] = −log p(token t+1 | tokens ≤ t).

    Args:
        output: Token losses or logits, see `token_log_probs`.
        microbatch: The micro-batch that made them.
        tp_group: Tensor-parallel group of vocabulary-parallel logits.

    Returns:
        l = Σ w·x over local tokens, 0-d float64, and {"lm loss": l detached}.
    """
    log_probs, _ = token_log_probs(output, microbatch, tp_group=tp_group)
    loss = microbatch.mean(-log_probs)
    return loss, {"lm loss": loss.detach()}

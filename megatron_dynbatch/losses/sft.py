"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.logprob import EntropyMode, vocab_parallel_logprob_entropy
from megatron_dynbatch.losses.model_output import of_chunked_head


def token_log_probs(
    output: Tensor,
    microbatch: MicroBatch,
    *,
    temperature: float = 1.0,
    entropy: EntropyMode = "none",
    tp_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, from whatever the model returned.

    Args:
        output: Token losses (one per local token, as GPTModel returns given labels), logits as
            `vocab_parallel_logprob_entropy` takes them, or the log-probs of a `ChunkedHead`.
        microbatch: Gives labels and mask.
        temperature: See `vocab_parallel_logprob_entropy`; so are entropy, tp_group, vocab_size,
            inplace_backward.

    Returns:
        logp [T_local] and entropy [T_local] (None if not asked for); 0 at masked tokens if taken
        from logits.

    Raises:
        ValueError: Temperature, entropy or vocab_size asked for where the model returned token
            losses; a chunked head with other options.
    """
    if output.shape == (2, microbatch.num_tokens):
        return of_chunked_head(output, temperature, entropy, vocab_size)
    if output.numel() != microbatch.num_tokens:
        return vocab_parallel_logprob_entropy(
            output,
            microbatch.labels,
            mask=microbatch.loss_mask,
            temperature=temperature,
            entropy=entropy,
            tp_group=tp_group,
            vocab_size=vocab_size,
            inplace_backward=inplace_backward,
        )
    if temperature != 1.0 or entropy != "none" or vocab_size is not None:
        raise ValueError(
            f"the model returned token losses of shape {list(output.shape)}; temperature, entropy "
            "and vocab_size need logits: do not pass labels to the model"
        )
    return -output.reshape(-1), None


def sft(
    output: Tensor,
    microbatch: MicroBatch,
    *,
    tp_group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy: x[t] = −log p(token t+1 | tokens ≤ t).

    Args:
        output: Token losses or logits, see `token_log_probs`.
        microbatch: The micro-batch that made them.
        tp_group: Tensor-parallel group of vocabulary-parallel logits.
        inplace_backward: Whether the gradient may take the memory of the logits.

    Returns:
        l = Σ w·x over local tokens, 0-d float64, and {"lm loss": l detached}.
    """
    log_probs, _ = token_log_probs(
        output, microbatch, tp_group=tp_group, inplace_backward=inplace_backward
    )
    loss = microbatch.mean(-log_probs)
    return loss, {"lm loss": loss.detach()}

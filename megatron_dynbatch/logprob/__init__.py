"""Log-probability and entropy of tokens from logits, with the vocabulary split over TP."""

import megatron_dynbatch._torch  # noqa: F401
from megatron_dynbatch.logprob.function import EntropyMode, vocab_parallel_logprob_entropy
from megatron_dynbatch.logprob.head import chunked_head_logprob_entropy

__all__ = ["EntropyMode", "chunked_head_logprob_entropy", "vocab_parallel_logprob_entropy"]

"""Losses as functions of model output and micro-batch, and what is handed to Megatron."""

from megatron_dynbatch.losses.logprob import vocab_parallel_logprob_entropy
from megatron_dynbatch.losses.policy import policy
from megatron_dynbatch.losses.scaling import megatron_loss
from megatron_dynbatch.losses.sft import sft, token_log_probs

__all__ = ["megatron_loss", "policy", "sft", "token_log_probs", "vocab_parallel_logprob_entropy"]

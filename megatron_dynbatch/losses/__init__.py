"""Losses as functions of model output and micro-batch, and what is handed to Megatron."""

import megatron_dynbatch._torch  # noqa: F401
from megatron_dynbatch.logprob import vocab_parallel_logprob_entropy
from megatron_dynbatch.losses.algorithms import (
    cispo,
    dapo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    ppo,
    reinforce,
)
from megatron_dynbatch.losses.kl import kl_to_reference
from megatron_dynbatch.losses.model_output import ChunkedHead, model_output
from megatron_dynbatch.losses.on_policy import old_log_probs_source
from megatron_dynbatch.losses.policy import PolicyOptions, policy
from megatron_dynbatch.losses.scaling import megatron_loss
from megatron_dynbatch.losses.sequence import sequence_means
from megatron_dynbatch.losses.sft import sft, token_log_probs
from megatron_dynbatch.losses.value import value
from megatron_dynbatch.losses.whitening import whiten_over_ranks

__all__ = [
    "ChunkedHead",
    "PolicyOptions",
    "cispo",
    "dapo",
    "dr_grpo",
    "gmpo",
    "grpo",
    "gspo",
    "kl_to_reference",
    "megatron_loss",
    "model_output",
    "old_log_probs_source",
    "policy",
    "ppo",
    "reinforce",
    "sequence_means",
    "sft",
    "token_log_probs",
    "value",
    "vocab_parallel_logprob_entropy",
    "whiten_over_ranks",
]

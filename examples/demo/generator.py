"""Samples from the policy in plain torch, as an inference engine would.

The model is the demo's GPT: RMSNorm, learned positions, SwiGLU, no biases, separate embeddings.
Sequences here are a dozen tokens long, so nothing is cached between tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.demo.agent import Response
from examples.demo.task import END, MAX_RESPONSE


class Generator:
    """A policy with fixed weights.

    Args:
        weights: Name → parameter, of a whole Megatron GPTModel.
        num_heads: Attention heads.
        random: Source of the sampling.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], num_heads: int, random: torch.Generator
    ) -> None:
        self._weights = weights
        self._num_heads = num_heads
        self._num_layers = 1 + max(
            int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers.")
        )
        self._random = random

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]]) -> list[Response]:
        """Sample one response to each prompt, at temperature 1, until END or MAX_RESPONSE."""
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        rows = torch.arange(len(prompts))
        # Padding stands on the right, where causal attention does not look.
        tokens = torch.zeros(len(prompts), int(lengths.max()) + MAX_RESPONSE, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        sampled, log_probs = [], []
        for step in range(MAX_RESPONSE):
            last = self.logits(tokens)[rows, lengths - 1 + step].log_softmax(-1)
            token = torch.multinomial(last.exp(), 1, generator=self._random)[:, 0]
            tokens[rows, lengths + step] = token
            sampled.append(token)
            log_probs.append(last[rows, token])
        return _cut(torch.stack(sampled, 1).tolist(), torch.stack(log_probs, 1).tolist())

    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits.

        Args:
            tokens: int64 [N, T].

        Returns:
            [N, T, V].
        """
        w = self._weights
        positions = w["embedding.position_embeddings.weight"][: tokens.shape[1]]
        x = F.embedding(tokens, w["embedding.word_embeddings.weight"]) + positions
        for number in range(self._num_layers):
            layer = {
                name.removeprefix(f"decoder.layers.{number}."): tensor
                for name, tensor in w.items()
                if name.startswith(f"decoder.layers.{number}.")
            }
            x = x + self._attention(_norm(x, layer["input_layernorm.weight"]), layer)
            gate, up = F.linear(
                _norm(x, layer["pre_mlp_layernorm.weight"]), layer["mlp.linear_fc1.weight"]
            ).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["mlp.linear_fc2.weight"])
        return F.linear(_norm(x, w["decoder.final_layernorm.weight"]), w["output_layer.weight"])

    def _attention(self, x: Tensor, layer: Mapping[str, Tensor]) -> Tensor:
        batch, length, hidden = x.shape
        # Megatron keeps query, key and value of one head together.
        qkv = F.linear(x, layer["self_attention.linear_qkv.weight"])
        query, key, value = qkv.view(batch, length, self._num_heads, 3, -1).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.linear(
            mixed.transpose(1, 2).reshape(batch, length, hidden),
            layer["self_attention.linear_proj.weight"],
        )


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-5)


def _cut(tokens: Sequence[list[int]], log_probs: Sequence[list[float]]) -> list[Response]:
    """Keep each response up to its first END."""
    responses = []
    for row, logs in zip(tokens, log_probs, strict=True):
        length = row.index(END) + 1 if END in row else len(row)
        responses.append(Response(row[:length], logs[:length]))
    return responses

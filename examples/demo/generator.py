"""Samples from the policy in plain torch, as an inference engine would.

The model is Megatron's GPT with RMSNorm, SwiGLU, no biases and separate embeddings; positions are
learned or rotary, queries may share keys and values, norms may be fused into the linear layers (as
Transformer Engine keeps them). Sequences here are a dozen tokens long, so nothing is cached between
tokens.
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
        random: Source of the sampling, on the CPU.
        rotary_base: Of the angles, where the model has no learned positions.
        vocab_size: Ids from here on only fill up the vocabulary and are never sampled.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        num_heads: int,
        random: torch.Generator,
        rotary_base: float = 10000.0,
        vocab_size: int | None = None,
    ) -> None:
        self._weights = {_unfused(name): tensor for name, tensor in weights.items()}
        self._num_heads = num_heads
        self._rotary_base = rotary_base
        self._vocab_size = vocab_size
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
            # Over all columns, as Megatron's loss has them, also those that only fill up.
            last = self.logits(tokens)[rows, lengths - 1 + step].float().cpu().log_softmax(-1)
            chances = last[:, : self._vocab_size].exp()
            token = torch.multinomial(chances, 1, generator=self._random)[:, 0]
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
        embedding = w["embedding.word_embeddings.weight"]
        x = F.embedding(tokens.to(embedding.device), embedding)
        if (learned := w.get("embedding.position_embeddings.weight")) is not None:
            x = x + learned[: tokens.shape[1]]
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
        batch, length, _ = x.shape
        projection = layer["self_attention.linear_proj.weight"]
        qkv = F.linear(x, layer["self_attention.linear_qkv.weight"])
        width = projection.shape[1] // self._num_heads
        # Megatron keeps the queries that share a key and a value together with them.
        groups = (qkv.shape[2] // width - self._num_heads) // 2
        qkv = qkv.view(batch, length, groups, -1, width)
        query, key, value = qkv.split([qkv.shape[3] - 2, 1, 1], 3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in (query, key, value))
        if "embedding.position_embeddings.weight" not in self._weights:
            query, key = self._rotated(query), self._rotated(key)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=groups < self._num_heads
        )
        return F.linear(mixed.transpose(1, 2).flatten(2), projection)

    def _rotated(self, x: Tensor) -> Tensor:
        """Turn the two halves of each head [N, H, T, D] by angles that grow with the position."""
        length, width = x.shape[2:]
        steps = torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width
        positions = torch.arange(length, dtype=torch.float32, device=x.device)
        angles = torch.outer(positions, self._rotary_base**-steps).repeat(1, 2)
        left, right = x.chunk(2, -1)
        return (x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()).to(x.dtype)


def _unfused(name: str) -> str:
    """The name that a norm's weight has where it is a layer of its own."""
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps=1e-5)


def _cut(tokens: Sequence[list[int]], log_probs: Sequence[list[float]]) -> list[Response]:
    """Keep each response up to its first END."""
    responses = []
    for row, logs in zip(tokens, log_probs, strict=True):
        length = row.index(END) + 1 if END in row else len(row)
        responses.append(Response(row[:length], logs[:length]))
    return responses

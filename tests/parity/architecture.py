"""The tiny GPT of the parity suite: sizes, Megatron flags, and its initial weights by global name.

Names and shapes are those of an unsharded Megatron GPTModel, with layers counted over the whole
model, so that any rank of any layout can pick its part.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Architecture:
    """Decoder with RoPE, RMSNorm, SwiGLU and grouped queries, without biases, untied embeddings.

    Attributes:
        num_layers: L.
        hidden: Width of the residual stream.
        heads: Query heads.
        query_groups: Key/value heads.
        ffn: Width of the SwiGLU.
        vocab: Rows of both embeddings; a multiple of 128, so that Megatron pads none.
        experts: E of every layer; 0: dense.
        topk: Experts that a token goes to.
        router_score: "softmax" or "sigmoid".
        mtp: Whether there is a module for the token after the next one.
    """

    num_layers: int = 4
    hidden: int = 32
    heads: int = 4
    query_groups: int = 2
    ffn: int = 48
    vocab: int = 128
    experts: int = 0
    topk: int = 2
    router_score: str = "softmax"
    mtp: bool = False

    # Where the decoder layer lies inside the module.
    mtp_layer = "mtp_model_layer."

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    def flags(self) -> dict[str, object]:
        """Megatron's options for this architecture."""
        flags: dict[str, object] = {
            "num-layers": self.num_layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "group-query-attention": True,
            "num-query-groups": self.query_groups,
            "ffn-hidden-size": self.ffn,
            "swiglu": True,
            "normalization": "RMSNorm",
            "disable-bias-linear": True,
            "position-embedding-type": "rope",
            "max-position-embeddings": 512,
            "untie-embeddings-and-output-weights": True,
            "tokenizer-type": "NullTokenizer",
            # Some versions add an id for the end of document, the others are padded by one.
            "vocab-size": self.vocab - 1,
            "make-vocab-size-divisible-by": 32,
            "attention-dropout": 0.0,
            "hidden-dropout": 0.0,
        }
        if self.experts:
            flags |= {
                "num-experts": self.experts,
                "moe-router-topk": self.topk,
                "moe-token-dispatcher-type": "alltoall",
                "moe-router-score-function": self.router_score,
            }
        if self.mtp:
            flags["mtp-num-layers"] = 1
        return flags

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Global name and unsharded shape of every parameter."""
        hidden = self.hidden
        yield "embedding.word_embeddings.weight", (self.vocab, hidden)
        for layer in range(self.num_layers):
            yield from self._layer(f"decoder.layers.{layer}.")
        yield "decoder.final_layernorm.weight", (hidden,)
        yield "output_layer.weight", (self.vocab, hidden)
        if self.mtp:
            prefix = "mtp.layers.0."
            for name in ("enorm", "hnorm", "final_layernorm"):
                yield f"{prefix}{name}.weight", (hidden,)
            yield prefix + "eh_proj.weight", (hidden, 2 * hidden)
            yield from self._layer(prefix + self.mtp_layer)

    def _layer(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, qkv = self.hidden, (self.heads + 2 * self.query_groups) * self.head_dim
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attention.linear_qkv.weight", (qkv, hidden)
        yield prefix + "self_attention.linear_proj.weight", (hidden, hidden)
        yield prefix + "pre_mlp_layernorm.weight", (hidden,)
        mlps = ["mlp."]
        if self.experts:
            yield prefix + "mlp.router.weight", (self.experts, hidden)
            mlps = [f"mlp.experts.local_experts.{expert}." for expert in range(self.experts)]
        for mlp in mlps:
            yield f"{prefix}{mlp}linear_fc1.weight", (2 * self.ffn, hidden)
            yield f"{prefix}{mlp}linear_fc2.weight", (hidden, self.ffn)

    def initial_parameters(self) -> dict[str, Tensor]:
        """Global name → float32 tensor; each drawn from a generator seeded by its name."""
        return {name: _drawn(name, shape) for name, shape in self.shapes()}


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * values
    # Large enough that attention patterns and logits are far from uniform.
    return 0.25 * values

"""The GPT of the independent loop, in plain torch: one sequence at a time, dense or with experts.

Formulas: RoPE (Su et al. 2021), RMSNorm, SwiGLU, grouped queries; top-k experts as in Switch
Transformer and Mixtral; z-loss of ST-MoE; a module for the token after the next one as in the
DeepSeek-V3 report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.parity.architecture import Architecture

type Parameters = Mapping[str, Tensor]


@dataclass
class Routing:
    """What one router did with one sequence.

    Attributes:
        logits: [T, E].
        probabilities: [T, E], of all experts.
        chosen: bool [T, E].
        likeliest: bool [T, E], the choice without bias: what balancing losses count.
    """

    logits: Tensor
    probabilities: Tensor
    chosen: Tensor
    likeliest: Tensor


@dataclass
class Forward:
    """What the model makes of one sequence.

    Attributes:
        logits: [T, vocab].
        routings: One per layer; none without experts.
        later_logits: [T, vocab], of the token after the next one; None without that module.
    """

    logits: Tensor
    routings: list[Routing] = field(default_factory=list)
    later_logits: Tensor | None = None


def forward(
    parameters: Parameters,
    tokens: Sequence[int],
    architecture: Architecture,
    biases: Sequence[Tensor] | None = None,
) -> Forward:
    """The model on one sequence of T tokens.

    Args:
        parameters: Global name → value.
        tokens: T token ids.
        architecture: The model.
        biases: Expert bias [E] of each layer, for the choice of experts alone.
    """
    found = Forward(torch.empty(0))
    embedding = parameters["embedding.word_embeddings.weight"]
    ids = torch.tensor(tokens)
    stream = embedding[ids]
    for number in range(architecture.num_layers):
        own = _below(parameters, f"decoder.layers.{number}.")
        bias = None if biases is None else biases[number]
        stream = _layer(stream, own, architecture, bias, found.routings)
    stream = _norm(stream, parameters["decoder.final_layernorm.weight"])
    output = parameters["output_layer.weight"]
    found.logits = stream @ output.T
    if architecture.mtp:
        own = _below(parameters, "mtp.layers.0.")
        following = torch.cat([ids[1:], torch.zeros(1, dtype=ids.dtype)])
        pair = [
            _norm(embedding[following], own["enorm.weight"]),
            _norm(stream, own["hnorm.weight"]),
        ]
        later = torch.cat(pair, -1) @ own["eh_proj.weight"].T
        later = _layer(later, _below(own, architecture.mtp_layer), architecture, None, [])
        found.later_logits = _norm(later, own["final_layernorm.weight"]) @ output.T
    return found


def _below(parameters: Parameters, prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}


def _layer(
    stream: Tensor,
    own: Parameters,
    architecture: Architecture,
    bias: Tensor | None,
    routings: list[Routing],
) -> Tensor:
    normed = _norm(stream, own["input_layernorm.weight"])
    stream = stream + _attention(normed, own, architecture)
    normed = _norm(stream, own["pre_mlp_layernorm.weight"])
    if "mlp.router.weight" in own:
        return stream + _experts(normed, own, architecture, bias, routings)
    return stream + _swiglu(normed, _below(own, "mlp."))


def _norm(stream: Tensor, weight: Tensor) -> Tensor:
    return stream / torch.sqrt((stream**2).mean(-1, keepdim=True) + 1e-5) * weight


def _attention(stream: Tensor, own: Parameters, architecture: Architecture) -> Tensor:
    length, groups, width = len(stream), architecture.query_groups, architecture.head_dim
    per_group = architecture.heads // groups
    # Megatron's rows: for each group its queries, then its key, then its value.
    mixed = stream @ own["self_attention.linear_qkv.weight"].T
    mixed = mixed.view(length, groups, per_group + 2, width).permute(1, 2, 0, 3)
    query = _rotate(mixed[:, :per_group])
    key = _rotate(mixed[:, per_group : per_group + 1])
    scores = query @ key.transpose(-1, -2) / math.sqrt(width)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    attended = scores.masked_fill(future, -math.inf).softmax(-1) @ mixed[:, per_group + 1 :]
    merged = attended.permute(2, 0, 1, 3).reshape(length, -1)
    return merged @ own["self_attention.linear_proj.weight"].T


def _rotate(heads: Tensor) -> Tensor:
    """Rotary embedding of [..., T, d]; angles in float32, as Megatron tabulates them."""
    length, width = heads.shape[-2:]
    frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., : width // 2], heads[..., width // 2 :]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _swiglu(stream: Tensor, own: Parameters) -> Tensor:
    gate, up = (stream @ own["linear_fc1.weight"].T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ own["linear_fc2.weight"].T


def _experts(
    stream: Tensor,
    own: Parameters,
    architecture: Architecture,
    bias: Tensor | None,
    routings: list[Routing],
) -> Tensor:
    """Every expert on its own tokens, weighted by the router's gates."""
    logits = stream @ own["mlp.router.weight"].T
    if architecture.router_score == "softmax":
        probabilities = logits.softmax(-1)
        choice = logits.topk(architecture.topk, -1).indices
        # The gates are a softmax over the chosen experts alone.
        gates = logits.gather(-1, choice).softmax(-1)
    else:
        scores = torch.sigmoid(logits)
        probabilities = scores / scores.sum(-1, keepdim=True)
        ranked = scores if bias is None else scores + bias
        choice = ranked.topk(architecture.topk, -1).indices
        gates = scores.gather(-1, choice)
        gates = gates / gates.sum(-1, keepdim=True)
    none = torch.zeros_like(logits, dtype=torch.bool)
    likeliest = none.scatter(-1, logits.topk(architecture.topk, -1).indices, True)
    chosen = none.scatter(-1, choice, True)
    routings.append(Routing(logits, probabilities, chosen, likeliest))
    result = torch.zeros_like(stream)
    for expert in range(architecture.experts):
        token, place = (choice == expert).nonzero(as_tuple=True)
        weights = _below(own, f"mlp.experts.local_experts.{expert}.")
        part = gates[token, place][:, None] * _swiglu(stream[token], weights)
        result = result.index_add(0, token, part)
    return result

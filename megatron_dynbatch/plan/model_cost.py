"""Cost models of a Megatron model, counted from its config, or fitted to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.plan.cost import CostModel

# A matrix product costs 2 FLOPs per multiply-add, and runs forward and twice backward.
FLOPS_PER_WEIGHT = 6
# Config names (left, `TransformerConfig`) that Megatron's arguments spell differently.
SPELLINGS = {"gated_linear_unit": "swiglu", "num_moe_experts": "num_experts"}


def cost_from_megatron(config: Any, vocab_size: int | None = None) -> CostModel:
    """FLOPs of training on a sample, forward and backward, whole model.

    Counts what Megatron's `num_floating_point_operations` counts (megatron-core 0.19,
    training/training.py): linear layers, causal attention, gated MLPs, routed and shared
    experts, multi-latent attention, multi-token prediction and the output layer; and, which that
    one does not, sliding-window attention.

    Args:
        config: Megatron's arguments, or a `TransformerConfig`.
        vocab_size: Padded vocabulary; None takes `config.padded_vocab_size`.

    Raises:
        PlanError: The model has layers that this count does not know (Mamba, linear attention).
    """
    if _get(config, "hybrid_layer_pattern") or _get(config, "experimental_attention_variant"):
        raise PlanError(
            "cost model: hybrid and linear-attention models are not counted; give measured "
            "coefficients or a cost function"
        )
    vocabulary = vocab_size or _get(config, "padded_vocab_size")
    if vocabulary is None:
        raise PlanError("cost model: the config has no padded_vocab_size, give vocab_size")
    hidden, extra = config.hidden_size, _get(config, "mtp_num_layers") or 0
    num_layers = config.num_layers + extra
    linear, pair_width = _attention(config)
    weights = (
        num_layers * linear
        + _mlps(config, extra)
        + extra * (2 * hidden * hidden + 3 * hidden)
        + (extra + 1) * hidden * vocabulary
    )
    windowed = _num_windowed(config, num_layers)
    pair_cost = FLOPS_PER_WEIGHT * pair_width / 2  # half of the mask is causal
    window = _get(config, "window_size")
    return CostModel(
        alpha=float(FLOPS_PER_WEIGHT * weights),
        beta=float(pair_cost * (num_layers - windowed)),
        window_beta=float(pair_cost * windowed),
        window=window[0] + 1 if windowed and window else 0,
    )


def _get(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    return getattr(config, SPELLINGS.get(name, name), None) if value is None else value


def _attention(config: Any) -> tuple[int, int]:
    """Weights of an attention layer, and width of its two products per token pair."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if _get(config, "multi_latent_attention"):
        query_head = config.qk_head_dim + config.qk_pos_emb_head_dim
        query = heads * query_head
        if config.q_lora_rank is None:
            weights = hidden * query
        else:
            weights = config.q_lora_rank * (hidden + query + 1)
        key_value = heads * (config.qk_head_dim + config.v_head_dim)
        weights += config.kv_lora_rank * (hidden + key_value + 1)
        weights += hidden * config.qk_pos_emb_head_dim + heads * config.v_head_dim * hidden
        return weights, query + heads * config.v_head_dim
    kv_channels = _get(config, "kv_channels") or hidden // heads
    groups = _get(config, "num_query_groups") or heads
    if _get(config, "group_query_attention") is False:
        groups = heads
    query = kv_channels * heads
    gate = query if _get(config, "attention_output_gate") else 0
    return hidden * (2 * query + 2 * kv_channels * groups + gate), 2 * query


def _mlps(config: Any, extra: int) -> int:
    """Weights that a token meets in all MLPs, those of `extra` prediction layers included."""
    hidden = config.hidden_size
    matrices = 3 if _get(config, "gated_linear_unit") else 2
    dense = matrices * hidden * config.ffn_hidden_size
    if _get(config, "num_moe_experts") is None:
        return (config.num_layers + extra) * dense
    freq = config.moe_layer_freq
    if isinstance(freq, int):
        is_moe = [layer % freq == 0 for layer in range(config.num_layers)]
    else:
        is_moe = [bool(entry) for entry in freq]
    is_moe += [is_moe[-1]] * extra
    width = _get(config, "moe_ffn_hidden_size") or config.ffn_hidden_size
    latent = _get(config, "moe_latent_size")
    routed = matrices * width * config.moe_router_topk * (latent or hidden)
    shared = matrices * hidden * (_get(config, "moe_shared_expert_intermediate_size") or 0)
    projections = 2 * latent * hidden if latent else 0
    return sum(routed + projections + shared if moe else dense for moe in is_moe)


def _num_windowed(config: Any, num_layers: int) -> int:
    """Layers with sliding-window attention (`is_layer_window_attention` of megatron-core)."""
    if not _get(config, "window_size"):
        return 0
    skip = _get(config, "window_attn_skip_freq")
    if skip is None:
        return num_layers
    if isinstance(skip, int):
        return sum(layer % skip != 0 for layer in range(1, num_layers + 1))
    return sum(bool(entry) for entry in skip)


def fit_cost(micro_batches: Sequence[Sequence[int]], times: Sequence[float]) -> CostModel:
    """Fit alpha, beta and gamma to measured times by least squares, none below 0.

    Args:
        micro_batches: Lengths of the samples of each measured micro-batch, as laid out.
        times: Seconds that each took.

    Raises:
        PlanError: Fewer than three measurements, or a time that is not finite and > 0.
    """
    if len(micro_batches) != len(times) or len(times) < 3:
        raise PlanError(
            f"cost fit: needs one time per micro-batch and at least 3, got {len(micro_batches)} "
            f"micro-batches and {len(times)} times"
        )
    for number, time in enumerate(times):
        if not (np.isfinite(time) and time > 0):
            raise PlanError(f"cost fit: micro-batch {number} took {time} s; must be > 0")
    sums = [(sum(mb), sum(length * length for length in mb), 1) for mb in micro_batches]
    return fit_terms(np.array(sums, dtype=np.float64), times)


def fit_terms(table: NDArray[np.float64], times: Sequence[float]) -> CostModel:
    """Fit alpha, beta and gamma to times that are sums of their terms, none below 0.

    Args:
        table: [n, 3]: by what alpha, beta and gamma are multiplied in each time.
        times: [n] seconds, > 0.

    Raises:
        PlanError: The times do not grow with tokens.
    """
    best: NDArray[np.float64] | None = None
    error = np.inf
    # With three columns the best fit with no negative coefficient is found by trying all subsets.
    for mask in range(1, 8):
        used = [column for column in range(3) if mask >> column & 1]
        scale = table[:, used].max(axis=0)
        solution = np.linalg.lstsq(table[:, used] / scale, np.asarray(times), rcond=None)[0] / scale
        residual = float(np.square(table[:, used] @ solution - np.asarray(times)).sum())
        if (solution >= 0).all() and residual < error * (1 - 1e-9):
            best, error = np.zeros(3), residual
            best[used] = solution
    assert best is not None  # the constant alone always fits
    if not best[:2].any():
        raise PlanError("cost fit: times do not grow with tokens; measure other lengths")
    return CostModel(alpha=float(best[0]), beta=float(best[1]), gamma=float(best[2]))

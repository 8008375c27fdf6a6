"""FLOPs against Megatron's own count; fitted coefficients against those that made the times."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_dynbatch.plan import PlanError
from megatron_dynbatch.plan.cost import TOKENS, CostModel, integer_costs
from megatron_dynbatch.plan.model_cost import cost_from_megatron, fit_cost

DENSE = {
    "hidden_size": 512,
    "num_layers": 6,
    "num_attention_heads": 8,
    "group_query_attention": False,
    "num_query_groups": 8,
    "kv_channels": 64,
    "ffn_hidden_size": 2048,
    "swiglu": False,
    "num_experts": None,
    "moe_layer_freq": 1,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": None,
    "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "hybrid_layer_pattern": None,
    "padded_vocab_size": 32000,
    "seq_length": 4096,
}
MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 192,
    "kv_lora_rank": 64,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 48,
}
MOE = {"num_experts": 8, "moe_ffn_hidden_size": 768, "swiglu": True}
MODELS = {
    "dense": {},
    "gated": {"swiglu": True},
    "gqa": {"group_query_attention": True, "num_query_groups": 2, "swiglu": True},
    "wide heads": {"kv_channels": 128, "attention_output_gate": True},
    "mla": MLA,
    "mla without q lora": {**MLA, "q_lora_rank": None},
    "moe": MOE,
    "moe every second layer": {**MOE, "moe_layer_freq": 2},
    "moe by list, shared expert": {
        **MOE,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "moe_shared_expert_intermediate_size": 1024,
    },
    "moe latent": {**MOE, "moe_latent_size": 128},
    "prediction layers": {**MOE, "mtp_num_layers": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_megatrons_own(name: str) -> None:
    training = pytest.importorskip("megatron.training.training")
    args = SimpleNamespace(**{**DENSE, **MODELS[name]})
    lengths = np.array([7, 100, 4096, 32768])
    expected = training.num_floating_point_operations(
        args, 1, int((lengths**2).sum()), int(lengths.sum())
    )
    counted = float(cost_from_megatron(args).sample_costs(lengths).sum())
    assert counted == pytest.approx(expected, rel=1e-9)


def test_default_is_a_dense_model_of_hidden_size_4096() -> None:
    args = SimpleNamespace(
        **{
            **DENSE,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "kv_channels": 128,
            "ffn_hidden_size": 4 * 4096,
            "padded_vocab_size": 0,
        }
    )
    model = cost_from_megatron(args, vocab_size=1)
    # The default counts attention over the whole square, twice what a causal mask leaves.
    assert model.alpha / (2 * model.beta) == pytest.approx(CostModel().alpha, rel=1e-3)


@pytest.mark.parametrize(("skip", "num_windowed"), [(None, 6), (3, 4), ([1, 0, 0, 1, 0, 0], 2)])
def test_sliding_window_counts_the_pairs_inside(skip: object, num_windowed: int) -> None:
    changes = {"window_size": (99, 0), "window_attn_skip_freq": skip}
    args = SimpleNamespace(**{**DENSE, **changes})
    full = cost_from_megatron(SimpleNamespace(**DENSE))
    windowed = cost_from_megatron(args)
    for length in (50, 100, 1000):
        pairs = sum(min(position + 1, 100) for position in range(length))
        # Megatron's convention takes s² for 2 · pairs, without the diagonal's s.
        twice = 2 * pairs - min(length, 100)
        expected = full.alpha * length + full.beta / 6 * (
            (6 - num_windowed) * length**2 + num_windowed * twice
        )
        cost = float(windowed.sample_costs(np.array([length]))[0])
        assert cost == pytest.approx(expected, rel=1e-12)


def test_models_that_are_not_counted() -> None:
    args = SimpleNamespace(**{**DENSE, "hybrid_layer_pattern": "M*M*"})
    with pytest.raises(PlanError, match="hybrid"):
        cost_from_megatron(args)
    with pytest.raises(PlanError, match="no padded_vocab_size"):
        cost_from_megatron(SimpleNamespace(**{**DENSE, "padded_vocab_size": None}))


def test_fit_finds_the_coefficients_that_made_the_times() -> None:
    truth = CostModel(alpha=3e-6, beta=2e-11, gamma=4e-4)
    micro_batches = [[100, 2000], [8000], [512] * 12, [30000, 7], [64]]
    times = [float(truth.sample_costs(np.array(mb)).sum()) + truth.gamma for mb in micro_batches]
    fitted = fit_cost(micro_batches, times)
    for name in ("alpha", "beta", "gamma"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-6)


def test_fit_has_no_negative_coefficient_and_names_bad_times() -> None:
    fitted = fit_cost([[100], [200], [400], [800]], [1.0, 2.0, 3.5, 6.0])
    assert min(fitted.alpha, fitted.beta, fitted.gamma) >= 0
    with pytest.raises(PlanError, match="micro-batch 1 took nan s"):
        fit_cost([[1], [2], [3]], [1.0, float("nan"), 2.0])
    with pytest.raises(PlanError, match="at least 3"):
        fit_cost([[1], [2]], [1.0, 2.0])
    with pytest.raises(PlanError, match="do not grow"):
        fit_cost([[1], [2], [3]], [1.0, 1.0, 1.0])


def nan_at_seven(lengths: np.ndarray) -> np.ndarray:
    return np.where(lengths == 7, np.nan, lengths)


def square(lengths: np.ndarray) -> np.ndarray:
    return lengths**2


def scalar(lengths: np.ndarray) -> float:
    return 1.0


def test_custom_cost_function_and_its_faults() -> None:
    lengths = np.array([3, 7])
    assert CostModel(function=f"{__name__}:square").sample_costs(lengths).tolist() == [9, 49]
    with pytest.raises(PlanError, match="answers nan for sample 1 of 7 tokens"):
        CostModel(function=f"{__name__}:nan_at_seven").sample_costs(lengths)
    with pytest.raises(PlanError, match=r"shape \(\) for 2 lengths"):
        CostModel(function=f"{__name__}:scalar").sample_costs(lengths)
    with pytest.raises(PlanError, match="cannot be imported"):
        CostModel(function="no.such:thing").sample_costs(lengths)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": float("nan")}, "alpha must be finite"),
        ({"beta": -1.0}, "beta must be finite and >= 0, got -1.0"),
        ({"alpha": 0.0, "beta": 0.0}, "every sample would be free"),
        ({"window_beta": 1.0}, "needs a window"),
    ],
)
def test_cost_models_that_cannot_be(fields: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        CostModel(**fields)  # type: ignore[arg-type]


def test_integer_costs_keep_integers_and_ratios() -> None:
    exact = CostModel().sample_costs(np.array([1, 10, 1000]))
    assert integer_costs(exact).tolist() == [24577, 245860, 25576000]
    assert TOKENS.sample_costs(np.array([5])).tolist() == [5]
    scaled = integer_costs(np.array([1e-9, 3e-9, 5e18]) * 1e3)
    assert scaled[-1] == pytest.approx(2**40, rel=0.5)
    assert (scaled >= 1).all()
    thirds = integer_costs(np.array([1 / 3, 2 / 3]))
    assert thirds[1] == pytest.approx(2 * thirds[0], abs=1)

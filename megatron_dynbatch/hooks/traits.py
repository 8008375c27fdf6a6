"""What mixes tokens, samples or loss terms in a training, and what proves it right.

One table. A trait with a row of docs/parity.md trains, from the version on that the row stands for;
one without is refused by name before training (see `admission`). Two traits are proved together by
a row of `proven`. Number formats and fused kernels are no traits.
"""

from __future__ import annotations

import argparse

from megatron_dynbatch.hooks.refusals import REFUSALS
from megatron_dynbatch.hooks.trait import Trait, above_one, balances, both, equals, negated, on
from megatron_dynbatch.hooks.version import AUX_LOSSES_SINCE

# Tables of docs/parity.md, by their keys in tests/parity/page.py.
LAYOUTS, EXPERTS, FEATURES, OPTIONS, PATHS = "float64", "experts", "features", "options", "paths"

# Oldest versions with which rows were run: trainings of a stock script (docs/versions.md), and
# tests/parity (YaRN: an option from 0.18 on, where its row fails).
_OLDEST, _FEATURES_SINCE, _YARN_SINCE = (0, 16), (0, 17), (0, 19)

_ATTENTION, _WINDOW, _SOFTMAX = "attention", "attention window", "softmax"
_POSITIONS, _LAYERS, _TERMS, _BALANCE = "positions", "layers", "loss terms", "load balancing"
_LAYOUT, _REDUCTION, _WIDTH, _STEP = "layout", "reduction", "width", "step"
_OPTIMIZER, _CHANCE, _SCRIPT = "optimizer", "chance", "script"


def _has_data_parallel_ranks(args: argparse.Namespace) -> bool:
    # Not known before the ranks are there: taken for granted then.
    return (getattr(args, "data_parallel_size", None) or 2) > 1


def _recomputes_terms(args: argparse.Namespace) -> bool:
    # Core attention and the like run again without routers or losses.
    modules = getattr(args, "recompute_modules", None) or ()
    return getattr(args, "recompute_granularity", None) == "full" or "moe" in modules


_VIRTUAL = on(
    "virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
)  # fmt: skip
_HYBRID = on("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")
_DISTRIBUTED = "DP2-first-fit-sample-megatron-per_token-distributed-overlap-variable-skip"

_MODEL = (
    Trait(_ATTENTION, "self-attention", "self-attention", negated(on("multi_latent_attention")),
          (LAYOUTS, "CP2")),
    Trait(_ATTENTION, "latent-attention", "--multi-latent-attention", on("multi_latent_attention"),
          (FEATURES, "MLA, CP2"),
          since=_FEATURES_SINCE),
    Trait(_WINDOW, "sliding-window", "--window-size", on("window_size"),
          (FEATURES, "sliding window, CP2"),
          since=_FEATURES_SINCE),
    Trait(_SOFTMAX, "sinks", "--softmax-type learnable", equals("softmax_type", "learnable"),
          (FEATURES, "sinks, TP2+SP"),
          since=_FEATURES_SINCE),
    Trait(_SOFTMAX, "off-by-one-softmax", "--softmax-type off-by-one",
          equals("softmax_type", "off-by-one"), (FEATURES, "off-by-one softmax, CP2"),
          since=_FEATURES_SINCE),
    Trait(_ATTENTION, "gated-delta-net", "--experimental-attention-variant gated_delta_net",
          equals("experimental_attention_variant", "gated_delta_net"),
          reason="whether its state ends with a sample is not tested; leave it out"),
    Trait(_ATTENTION, "dsa", "--experimental-attention-variant dsa",
          equals("experimental_attention_variant", "dsa"),
          reason="no parity test has it; leave it out"),
    Trait(_SOFTMAX, "qk-clip", "--qk-clip", on("qk_clip"),
          reason="the largest attention logit is taken over padding too; leave it out"),
    Trait(_POSITIONS, "rope", "--position-embedding-type rope",
          equals("position_embedding_type", "rope"), (LAYOUTS, "CP2")),
    Trait(_POSITIONS, "yarn", "--position-embedding-type yarn",
          equals("position_embedding_type", "yarn"), (FEATURES, "YaRN, CP2"),
          since=_YARN_SINCE),
    Trait(_POSITIONS, "learned", "--position-embedding-type learned_absolute",
          equals("position_embedding_type", "learned_absolute"),
          (FEATURES, "learned positions, CP2"),
          since=_FEATURES_SINCE),
    Trait(_POSITIONS, "none", "--position-embedding-type none",
          equals("position_embedding_type", "none"), (FEATURES, "no positions, CP2"),
          since=_FEATURES_SINCE),
    Trait(_POSITIONS, "other-positions", "--position-embedding-type mrope or relative",
          equals("position_embedding_type", "mrope", "relative"),
          reason="no parity test has it; take rope, yarn, learned_absolute or none"),
    Trait(_LAYERS, "experts", "--num-experts", on("num_experts"), (EXPERTS, "z-loss, EP2"),
          since=AUX_LOSSES_SINCE, admissible=False),
    Trait(_LAYERS, "hybrid-layers", "--hybrid-layer-pattern", _HYBRID,
          reason="whether the state of a Mamba layer ends with a sample is not tested; train a GPT "
          "model"),
    Trait(_LAYERS, "heterogeneous-layers", "--heterogeneous-layers-config-path",
          on("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
          reason="no parity test has it; leave it out"),
    Trait(_LAYERS, "model-class", "a model of another class than GPTModel", None,
          reason="parity tests have GPTModel only; build one"),
)  # fmt: skip

_LOSS = (
    Trait(_TERMS, "z-loss", "--moe-z-loss-coeff",
          both(on("num_experts"), on("moe_z_loss_coeff")), (EXPERTS, "z-loss, EP2"),
          since=AUX_LOSSES_SINCE, admissible=False),
    Trait(_TERMS, "aux-loss", "--moe-router-load-balancing-type aux_loss", balances("aux_loss"),
          (EXPERTS, "load balancing, EP2xPP2"), since=AUX_LOSSES_SINCE, admissible=False),
    Trait(_TERMS, "seq-aux-loss", "--moe-router-load-balancing-type seq_aux_loss",
          balances("seq_aux_loss"), (EXPERTS, "balance of each sample, EP2"),
          since=AUX_LOSSES_SINCE, admissible=False),
    Trait(_TERMS, "global-aux-loss", "--moe-router-load-balancing-type global_aux_loss",
          balances("global_aux_loss"),
          reason="its running counts depend on the packing and on the order of micro-batches; "
          "write aux_loss with --moe-balance previous-step or same-step, which is the loss over "
          "the whole step"),
    Trait(_BALANCE, "balance-previous-step", "--moe-balance previous-step",
          both(balances("aux_loss"), equals("moe_balance", "previous-step")),
          (EXPERTS, "balance of the previous step, EP2"), since=AUX_LOSSES_SINCE,
          admissible=False),
    Trait(_BALANCE, "balance-same-step", "--moe-balance same-step",
          both(balances("aux_loss"), equals("moe_balance", "same-step")),
          (EXPERTS, "balance of the same step, EP2xPP2"), since=AUX_LOSSES_SINCE,
          admissible=False),
    Trait(_TERMS, "expert-bias", "--moe-router-enable-expert-bias",
          on("moe_router_enable_expert_bias"), (EXPERTS, "expert bias, EP2"),
          since=AUX_LOSSES_SINCE, admissible=False),
    Trait(_TERMS, "mtp", "--mtp-num-layers", on("mtp_num_layers"), (EXPERTS, "MTP, CP2"),
          since=AUX_LOSSES_SINCE, admissible=False),
    Trait(_TERMS, "dsa-indexer-loss", "--dsa-indexer-loss-coeff",
          both(equals("experimental_attention_variant", "dsa"), on("dsa_indexer_loss_coeff")),
          reason="the term weighs every micro-batch alike, so it depends on the packing; leave it "
          "out"),
    *(Trait(_REDUCTION, f"{name}-mean", f"--loss-reduction {name}", equals("loss_reduction", name),
            (OPTIONS, row), since=since)
      for name, row, since in (
          ("rollout", "DP2-planner-rollout-logits-fixed-count", _OLDEST),
          ("sample", "CP2-planner-sample-logits-fixed-count", _FEATURES_SINCE),
          ("token", "CP2-first-fit-token-logits-fixed-count", _FEATURES_SINCE),
          ("group", "PP2-planner-group-logits-fixed-count", _FEATURES_SINCE),
          ("constant", "PP2-planner-constant-logits-fixed-count", _FEATURES_SINCE),
      )),
    Trait(_STEP, "empty-skipped", "--empty-rollouts skip", equals("empty_rollouts", "skip"),
          (OPTIONS, "CP2-finest-group-megatron-variable-skip"),
          since=_FEATURES_SINCE),
    Trait(_STEP, "per-token-loss", "--calculate-per-token-loss", on("calculate_per_token_loss"),
          (OPTIONS, "PP2xVPP2-planner-token-megatron-per_token-overlap-variable-count"),
          since=_FEATURES_SINCE),
)  # fmt: skip

_RUN = (
    Trait(_LAYOUT, "data-parallel", "data parallelism", _has_data_parallel_ranks, (LAYOUTS, "DP2")),
    Trait(_LAYOUT, "tensor-parallel", "--tensor-model-parallel-size",
          above_one("tensor_model_parallel_size"), (LAYOUTS, "TP2"),
          since=_FEATURES_SINCE),
    Trait(_LAYOUT, "sequence-parallel", "--sequence-parallel", on("sequence_parallel"),
          (LAYOUTS, "TP2+SP"),
          since=_FEATURES_SINCE),
    Trait(_LAYOUT, "context-parallel", "--context-parallel-size",
          above_one("context_parallel_size"), (LAYOUTS, "CP2"),
          since=_FEATURES_SINCE),
    Trait(_LAYOUT, "pipeline", "--pipeline-model-parallel-size",
          above_one("pipeline_model_parallel_size"), (LAYOUTS, "PP2")),
    Trait(_LAYOUT, "virtual-pipeline", "virtual pipeline stages", _VIRTUAL,
          (LAYOUTS, "PP2xVPP2"),
          since=_FEATURES_SINCE),
    Trait(_LAYOUT, "expert-parallel", "--expert-model-parallel-size",
          above_one("expert_model_parallel_size"), (EXPERTS, "z-loss, EP2"),
          since=AUX_LOSSES_SINCE, admissible=False),
    Trait(_WIDTH, "fixed-width", "--micro-batch-width fixed", equals("micro_batch_width", "fixed"),
          (PATHS, "fixed width 128, DP2")),
    Trait(_WIDTH, "variable-width", "--micro-batch-width variable",
          equals("micro_batch_width", "variable"), (LAYOUTS, "DP2"),
          since=_FEATURES_SINCE),
    Trait(_STEP, "recompute", "--recompute-granularity full", _recomputes_terms,
          (PATHS, "activations recomputed, PP2"),
          since=_FEATURES_SINCE),
    Trait(_STEP, "distributed-optimizer", "--use-distributed-optimizer",
          on("use_distributed_optimizer"), (OPTIONS, _DISTRIBUTED),
          since=_FEATURES_SINCE),
    Trait(_STEP, "overlap-grad-reduce", "--overlap-grad-reduce", on("overlap_grad_reduce"),
          (OPTIONS, _DISTRIBUTED),
          since=_FEATURES_SINCE),
    Trait(_STEP, "overlap-param-gather", "--overlap-param-gather", on("overlap_param_gather"),
          (OPTIONS, _DISTRIBUTED),
          since=_FEATURES_SINCE),
    Trait(_OPTIMIZER, "adam", "--optimizer adam", equals("optimizer", "adam"), (LAYOUTS, "DP2")),
    Trait(_OPTIMIZER, "sgd", "--optimizer sgd", equals("optimizer", "sgd"),
          (FEATURES, "SGD, DP2"),
          since=_FEATURES_SINCE),
    Trait(_OPTIMIZER, "other-optimizer", "--optimizer",
          lambda args: getattr(args, "optimizer", "adam") not in ("adam", "sgd"),
          reason="no parity test has this one; take adam or sgd"),
    Trait(_CHANCE, "dropout", "--attention-dropout, --hidden-dropout",
          on("attention_dropout", "hidden_dropout"),
          reason="what is dropped depends on the packing, and Megatron's defaults are 0.1; write "
          "--attention-dropout 0 --hidden-dropout 0"),
    Trait(_CHANCE, "input-jitter", "--moe-input-jitter-eps", on("moe_input_jitter_eps"),
          reason="the noise of a token depends on the packing; leave it out"),
    Trait(_CHANCE, "random-routing", "--moe-router-force-load-balancing",
          on("moe_router_force_load_balancing"),
          reason="the experts of a token depend on the packing; leave it out"),
    Trait(_SCRIPT, "batch-keys", "a script that asks its batch for other keys", None,
          reason="a batch has packed samples of a decoder; ask for what is there",
          admissible=False),
    Trait(_SCRIPT, "packed-sequences", "a script that calls its model without packed_seq_params",
          None, reason="samples would see each other; pass those of the batch", admissible=False),
)  # fmt: skip

TRAITS = (*_MODEL, *_LOSS, *_RUN, *REFUSALS)
# Not in the arguments: looked at when the model is there, and when it is called.
LATER = tuple(trait for trait in TRAITS if trait.present is None)
BY_NAME = {trait.name: trait for trait in TRAITS}


def traits_of(args: argparse.Namespace) -> list[Trait]:
    """What parsed arguments have of `TRAITS`."""
    return [trait for trait in TRAITS if trait.present is not None and trait.present(args)]

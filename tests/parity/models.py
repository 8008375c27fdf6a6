"""Tiny models with the architecture flags of what people train, and one flag at a time.

Each is a change of the suite's `Architecture` flags; None leaves a flag out.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.parity.alone import BY_SAMPLES, BY_TOKENS
from tests.parity.layouts import Layout

Flags = dict[str, object]


@dataclass(frozen=True)
class Model:
    """What to build and where.

    Attributes:
        flags: Changes of Megatron's options.
        layouts: Under which it is compared.
        weighted_by: What its routers' terms are means over.
    """

    flags: Flags
    layouts: tuple[Layout, ...]
    weighted_by: str = BY_TOKENS


_MLA: Flags = {
    "multi-latent-attention": True, "group-query-attention": None, "num-query-groups": None,
    "q-lora-rank": 12, "kv-lora-rank": 8, "qk-head-dim": 8, "qk-pos-emb-head-dim": 4,
    "v-head-dim": 6, "qk-layernorm": True,
}  # fmt: skip
_EXPERTS: Flags = {
    "num-experts": 4, "moe-router-topk": 2, "moe-token-dispatcher-type": "alltoall",
    "moe-router-load-balancing-type": "none",
}  # fmt: skip
_TIED: Flags = {"untie-embeddings-and-output-weights": None}
_YARN: Flags = {
    "position-embedding-type": "yarn", "rotary-scaling-factor": 4.0,
    "yarn-original-max-position-embeddings": 16, "yarn-beta-fast": 32.0, "yarn-beta-slow": 1.0,
}  # fmt: skip

DP2, CP2, TP2 = Layout(dp=2), Layout(cp=2), Layout(tp=2, sequence_parallel=True)
PP2, EP2 = Layout(pp=2), Layout(dp=2, ep=2)

FEATURES = {
    "MLA": Model(_MLA, (CP2,)),
    "MoE top-2 and shared experts": Model(
        {**_EXPERTS, "moe-shared-expert-intermediate-size": 24, "moe-z-loss-coeff": 0.1}, (EP2,)
    ),
    "experts": Model(_EXPERTS, (Layout(tp=2, dp=2, ep=2, sequence_parallel=True),)),
    "tied embeddings": Model(_TIED, (PP2, TP2)),
    "uneven stages": Model(
        {"decoder-first-pipeline-num-layers": 1, "decoder-last-pipeline-num-layers": 3}, (PP2,)
    ),
    "pipeline layout": Model({"pipeline-model-parallel-layout": "Et|tttL"}, (PP2,)),
    "selective recompute": Model({"recompute-granularity": "selective"}, (CP2,)),
    "QK layer norm": Model({"qk-layernorm": True}, (CP2,)),
    "learned positions": Model({"position-embedding-type": "learned_absolute"}, (CP2,)),
    "no positions": Model({"position-embedding-type": "none"}, (CP2,)),
    "interleaved RoPE": Model({"rotary-interleaved": True, "rotary-percent": 0.5}, (CP2,)),
    "SGD": Model({"optimizer": "sgd"}, (DP2,)),
    "layers without RoPE": Model({"no-rope-freq": 2}, (CP2,)),
    "sliding window": Model({"window-size": "6,0"}, (CP2,)),
    "sinks": Model({"softmax-type": "learnable"}, (TP2,)),
    "off-by-one softmax": Model({"softmax-type": "off-by-one"}, (CP2,)),
    "YaRN": Model(_YARN, (CP2,)),
    "LayerNorm, GELU, biases": Model(
        {"normalization": "LayerNorm", "swiglu": None, "disable-bias-linear": None,
         "group-query-attention": None, "num-query-groups": None}, (TP2,)
    ),
}  # fmt: skip

FAMILIES = {
    "Llama 3": Model(
        {"rotary-base": 500000, "use-rope-scaling": True, "rope-scaling-factor": 8.0}, (CP2,)
    ),
    "Qwen3": Model(
        {**_TIED, "qk-layernorm": True, "kv-channels": 16, "rotary-base": 1000000}, (TP2,)
    ),
    "Qwen3 MoE": Model(
        {**_EXPERTS, "qk-layernorm": True, "kv-channels": 16, "rotary-base": 1000000,
         "moe-router-pre-softmax": True, "moe-z-loss-coeff": 0.01}, (EP2,)
    ),
    "DeepSeek-V3": Model(
        {**_MLA, **_EXPERTS, "moe-router-load-balancing-type": "seq_aux_loss",
         "moe-aux-loss-coeff": 0.1, "moe-router-score-function": "sigmoid",
         "moe-router-enable-expert-bias": True, "moe-router-num-groups": 2,
         "moe-router-group-topk": 1, "moe-router-topk-scaling-factor": 2.5,
         "moe-shared-expert-intermediate-size": 24, "moe-layer-freq": "([0]+[1]*3)",
         "mtp-num-layers": 1, "mtp-loss-scaling-factor": 0.3},
        (EP2, CP2), BY_SAMPLES,
    ),
    "GPT-OSS": Model(
        {**_EXPERTS, **_YARN, "softmax-type": "learnable", "window-size": "5,0",
         "window-attn-skip-freq": 2, "add-qkv-bias": True, "swiglu": None,
         "quick-geglu": True, "glu-linear-offset": 1.0, "activation-func-clamp-value": 7.0},
        (EP2, CP2),
    ),
    "Gemma 3": Model(
        {**_TIED, "qk-layernorm": True, "kv-channels": 16, "window-size": "6,0",
         "window-attn-skip-freq": 3}, (CP2,)
    ),
}  # fmt: skip

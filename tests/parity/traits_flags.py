"""What a training is made of, trait by trait: Megatron's options, and which traits go together.

A row of `megatron_dynbatch.hooks.proven` is a set of traits; its training is built from these.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

from tests.parity.covering import sampled
from tests.parity.layouts import Layout
from tests.parity.models import _EXPERTS, _MLA, _YARN, Flags
from tests.parity.reference_aux import Auxiliary

type Traits = frozenset[str]

Z_LOSS, BALANCE, SAMPLE_BALANCE, MTP = 0.1, 1.0, 0.5, 0.3
MODEL: Mapping[str, Flags] = {
    "self-attention": {},
    "latent-attention": _MLA,
    "sliding-window": {"window-size": "6,0"},
    "sinks": {"softmax-type": "learnable"},
    "off-by-one-softmax": {"softmax-type": "off-by-one"},
    "rope": {},
    "yarn": _YARN,
    "learned": {"position-embedding-type": "learned_absolute"},
    "none": {"position-embedding-type": "none"},
    "experts": _EXPERTS,
    "expert-bias": {
        "moe-router-enable-expert-bias": True, "moe-router-score-function": "sigmoid",
    },
    "mtp": {"mtp-num-layers": 1, "mtp-loss-scaling-factor": MTP},
}  # fmt: skip
REDUCTIONS = ("rollout", "sample", "token", "group", "constant")
RUN: Mapping[str, Flags] = {
    "z-loss": {"moe-z-loss-coeff": Z_LOSS},
    "balance-previous-step": {"moe-balance": "previous-step"},
    "balance-same-step": {"moe-balance": "same-step"},
    **{f"{name}-mean": {"loss-reduction": name} for name in REDUCTIONS},
    "constant-mean": {"loss-reduction": "constant", "loss-constant": 9.0},
    "empty-skipped": {"empty-rollouts": "skip"},
    "per-token-loss": {"calculate-per-token-loss": True},
    "fixed-width": {"micro-batch-width": "fixed"},
    "variable-width": {"micro-batch-width": "variable"},
    "recompute": {
        "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1,
    },
    # It trains float32 weights only.
    "distributed-optimizer": {"use-distributed-optimizer": True, "precision": "float32"},
    "overlap-grad-reduce": {"overlap-grad-reduce": True},
    "overlap-param-gather": {"overlap-param-gather": True},
    "adam": {},
    "sgd": {"optimizer": "sgd"},
}  # fmt: skip
_SIZES = {
    "data-parallel": "dp", "tensor-parallel": "tp", "context-parallel": "cp", "pipeline": "pp",
    "virtual-pipeline": "vpp", "expert-parallel": "ep",
}  # fmt: skip
_LAYOUTS = (
    "data-parallel", "tensor-parallel", "tensor-parallel sequence-parallel", "context-parallel",
    "pipeline", "pipeline virtual-pipeline", "data-parallel expert-parallel",
    "context-parallel expert-parallel",
    "data-parallel tensor-parallel sequence-parallel expert-parallel",
    "data-parallel pipeline virtual-pipeline expert-parallel", "data-parallel context-parallel",
    "tensor-parallel sequence-parallel pipeline virtual-pipeline",
    "tensor-parallel sequence-parallel context-parallel",
    "pipeline virtual-pipeline context-parallel",
)  # fmt: skip
# Each training has one choice of each line; words are traits.
FACTORS: Sequence[Sequence[str]] = (
    ("self-attention", "latent-attention"),
    ("", "sliding-window"),
    ("", "sinks", "off-by-one-softmax"),
    ("rope", "yarn", "learned", "none"),
    ("", "experts"),
    ("", "z-loss"),
    ("", "aux-loss", "seq-aux-loss", "aux-loss seq-aux-loss", "aux-loss balance-previous-step",
     "aux-loss seq-aux-loss balance-previous-step", "aux-loss seq-aux-loss balance-same-step",
     "aux-loss balance-same-step"),
    ("", "expert-bias"),
    ("", "mtp"),
    tuple(f"{name}-mean" for name in REDUCTIONS),
    ("", "empty-skipped"),
    ("", "per-token-loss"),
    ("fixed-width", "variable-width"),
    ("", "recompute"),
    ("", "overlap-grad-reduce", "distributed-optimizer",
     "distributed-optimizer overlap-grad-reduce overlap-param-gather"),
    ("adam", "sgd"),
    _LAYOUTS,
)  # fmt: skip
_OF_EXPERTS = {"z-loss", "aux-loss", "seq-aux-loss", "expert-bias", "expert-parallel"}
_FLOAT32 = {"distributed-optimizer", "overlap-param-gather"}
# Refused for reasons of their own, by Megatron (MLA has YaRN by itself), or on CPUs only.
_APART = (
    {"mtp", "per-token-loss"}, {"balance-same-step", "overlap-param-gather"},
    {"mtp", "yarn"}, {"mtp", "learned"}, {"latent-attention", "yarn"},
    {"distributed-optimizer", "sgd"},
    {"latent-attention", "tensor-parallel"},
)  # fmt: skip


def completed(traits: Traits) -> Traits:
    """With the traits that these cannot be without."""
    if traits & _OF_EXPERTS:
        traits |= {"experts"}
    if "overlap-param-gather" in traits:
        traits |= {"distributed-optimizer"}
    if "sequence-parallel" in traits:
        traits |= {"tensor-parallel"}
    if {"experts", "tensor-parallel"} <= traits:
        traits |= {"sequence-parallel"}
    return traits


def allowed(traits: Traits) -> bool:
    """Whether Megatron trains these together."""
    return not any(apart <= traits for apart in _APART)


def met(traits: Traits) -> set[Traits]:
    """The pairs that a training proves: in float32, those with what needs it."""
    if not allowed(traits):
        return set()
    pairs = map(frozenset, itertools.combinations(sorted(traits), 2))
    return {pair for pair in pairs if not traits & _FLOAT32 or pair & _FLOAT32}


def covering_rows(seed: int = 0) -> list[Traits]:
    """Trainings in which every two traits meet that can be together."""
    draw = random.Random(seed)

    def random_traits(wanted: Traits) -> Traits:
        words = []
        for choices in FACTORS:
            fitting = [choice for choice in choices if wanted & set(choice.split())]
            words += draw.choice(fitting or choices).split()
        return completed(frozenset(words))

    names = {word for choices in FACTORS for choice in choices for word in choice.split()}
    rows = sampled(names, random_traits, met)
    return sorted(rows, key=lambda row: (bool(row & _FLOAT32), layout_of(row).ranks))


def layout_of(traits: Traits) -> Layout:
    """Groups of two."""
    sizes = {size: 2 for name, size in _SIZES.items() if name in traits}
    return Layout(**sizes, sequence_parallel="sequence-parallel" in traits)  # type: ignore[arg-type]


def model_flags(traits: Traits) -> Flags:
    """What to build, without the terms of routers."""
    return _merged(MODEL, traits)


def training_flags(traits: Traits) -> Flags:
    """All but the rollouts."""
    kinds = [name.replace("-", "_") for name in ("aux-loss", "seq-aux-loss") if name in traits]
    balance: Flags = {}
    if kinds:
        coefficients = {"aux_loss": BALANCE, "seq_aux_loss": SAMPLE_BALANCE}
        balance = {
            "moe-router-load-balancing-type": tuple(kinds),
            "moe-aux-loss-coeff": tuple(coefficients[kind] for kind in kinds),
        }
    layout = layout_of(traits).flags()
    return {**_merged(MODEL, traits), **_merged(RUN, traits), **balance, **layout}


def _merged(flags: Mapping[str, Flags], traits: Traits) -> Flags:
    return {k: v for name, own in flags.items() if name in traits for k, v in own.items()}


def auxiliary_of(traits: Traits) -> Auxiliary:
    """The routers' terms, for the closed forms."""
    over = {"balance-previous-step": "previous-step", "balance-same-step": "same-step"}
    return Auxiliary(
        z_loss=Z_LOSS if "z-loss" in traits else 0.0,
        balance=BALANCE if "aux-loss" in traits else 0.0,
        balance_over=next((v for k, v in over.items() if k in traits), "micro-batch"),
        sample_balance=SAMPLE_BALANCE if "seq-aux-loss" in traits else 0.0,
    )

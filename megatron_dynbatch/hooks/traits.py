"""What mixes tokens, samples or loss terms in a training, and what proves it right.

A trait with a parity row (docs/parity.md) trains; one without is refused by name before training,
unless `--admit-unproven` names it. Number formats and fused kernels are no traits.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dynbatch.errors import OptionError

type Test = Callable[[argparse.Namespace], bool]

# Tables of docs/parity.md, by their keys in tests/parity/page.py.
LAYOUTS, EXPERTS, FEATURES = "float64", "experts", "features"


@dataclass(frozen=True, slots=True)
class Trait:
    """A property of a model or a training.

    Attributes:
        kind: What it is a property of.
        name: As `--admit-unproven` takes it.
        present: Whether parsed arguments have it.
        row: (table, row) of docs/parity.md that proves it; None: nothing does.
        reason: Of one without a row: "FLAGS: why it is refused; what to write instead".
        since: First megatron-core that the row stands for.
    """

    kind: str
    name: str
    present: Test
    row: tuple[str, str] | None = None
    reason: str = ""
    since: str = "0.16"


def _on(*names: str) -> Test:
    return lambda args: any(getattr(args, name, None) for name in names)


def _is(name: str, *values: object) -> Test:
    return lambda args: getattr(args, name, None) in values


def _balances(kind: str) -> Test:
    def balances(args: argparse.Namespace) -> bool:
        given = getattr(args, "moe_router_load_balancing_type", "none")
        return bool(_on("num_experts")(args)) and kind in (
            [given] if isinstance(given, str) else given
        )

    return balances


def _both(first: Test, second: Test) -> Test:
    return lambda args: first(args) and second(args)


def _not(test: Test) -> Test:
    return lambda args: not test(args)


_ATTENTION, _LAYERS, _POSITIONS = "attention", "layers", "positions"
_TERMS, _OPTIMIZER, _CHANCE = "loss terms", "optimizer", "chance"
_HYBRID = _on("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")

TRAITS = (
    Trait(_ATTENTION, "self-attention", _not(_on("multi_latent_attention")), (LAYOUTS, "CP2")),
    Trait(_ATTENTION, "latent-attention", _on("multi_latent_attention"), (FEATURES, "MLA, CP2")),
    Trait(_ATTENTION, "sliding-window", _on("window_size"), (FEATURES, "sliding window, CP2")),
    Trait(_ATTENTION, "sinks", _is("softmax_type", "learnable"), (FEATURES, "sinks, TP2+SP")),
    Trait(_ATTENTION, "off-by-one-softmax", _is("softmax_type", "off-by-one"),
          (FEATURES, "off-by-one softmax, CP2")),
    Trait(_ATTENTION, "gated-delta-net", _is("experimental_attention_variant", "gated_delta_net"),
          reason="--experimental-attention-variant gated_delta_net: whether its state ends with a "
          "sample is not tested; leave it out"),
    Trait(_ATTENTION, "dsa", _is("experimental_attention_variant", "dsa"),
          reason="--experimental-attention-variant dsa: no parity test has it; leave it out"),
    Trait(_ATTENTION, "qk-clip", _on("qk_clip"),
          reason="--qk-clip: the largest attention logit is taken over padding too; leave it out"),
    Trait(_LAYERS, "experts", _on("num_experts"), (EXPERTS, "z-loss, EP2"), since="0.19"),
    Trait(_LAYERS, "hybrid-layers", _HYBRID,
          reason="--hybrid-layer-pattern: whether the state of a Mamba layer ends with a sample is "
          "not tested; train a GPT model"),
    Trait(_LAYERS, "heterogeneous-layers",
          _on("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
          reason="--heterogeneous-layers-config-path: no parity test has it; leave it out"),
    Trait(_POSITIONS, "rope", _is("position_embedding_type", "rope"), (LAYOUTS, "CP2")),
    Trait(_POSITIONS, "yarn", _is("position_embedding_type", "yarn"), (FEATURES, "YaRN, CP2")),
    Trait(_POSITIONS, "learned", _is("position_embedding_type", "learned_absolute"),
          (FEATURES, "learned positions, CP2")),
    Trait(_POSITIONS, "none", _is("position_embedding_type", "none"),
          (FEATURES, "no positions, CP2")),
    Trait(_POSITIONS, "other-positions", _is("position_embedding_type", "mrope", "relative"),
          reason="--position-embedding-type mrope or relative: no parity test has it; take rope, "
          "yarn, learned_absolute or none"),
    Trait(_TERMS, "z-loss", _both(_on("num_experts"), _on("moe_z_loss_coeff")),
          (EXPERTS, "z-loss, EP2"), since="0.19"),
    Trait(_TERMS, "aux-loss", _balances("aux_loss"), (EXPERTS, "load balancing, EP2xPP2"),
          since="0.19"),
    Trait(_TERMS, "seq-aux-loss", _balances("seq_aux_loss"),
          (EXPERTS, "balance of each sample, EP2"), since="0.19"),
    Trait(_TERMS, "global-aux-loss", _balances("global_aux_loss"),
          reason="--moe-router-load-balancing-type global_aux_loss: its running counts depend on "
          "the packing and on the order of micro-batches; write aux_loss with --moe-balance "
          "previous-step or same-step, which is the loss over the whole step"),
    Trait(_TERMS, "expert-bias", _on("moe_router_enable_expert_bias"),
          (EXPERTS, "expert bias, EP2"), since="0.19"),
    Trait(_TERMS, "mtp", _on("mtp_num_layers"), (EXPERTS, "MTP, CP2"), since="0.19"),
    Trait(_TERMS, "dsa-indexer-loss",
          _both(_is("experimental_attention_variant", "dsa"), _on("dsa_indexer_loss_coeff")),
          reason="--dsa-indexer-loss-coeff: the term weighs every micro-batch alike, so it depends "
          "on the packing; leave it out"),
    Trait(_OPTIMIZER, "adam", _is("optimizer", "adam"), (LAYOUTS, "DP2")),
    Trait(_OPTIMIZER, "sgd", _is("optimizer", "sgd"), (FEATURES, "SGD, DP2")),
    Trait(_OPTIMIZER, "other-optimizer", lambda args: getattr(args, "optimizer", "adam")
          not in ("adam", "sgd"),
          reason="--optimizer: no parity test has this one; take adam or sgd"),
    Trait(_CHANCE, "dropout", _on("attention_dropout", "hidden_dropout"),
          reason="--attention-dropout, --hidden-dropout: what is dropped depends on the packing, "
          "and Megatron's defaults are 0.1; write --attention-dropout 0 --hidden-dropout 0"),
    Trait(_CHANCE, "input-jitter", _on("moe_input_jitter_eps"),
          reason="--moe-input-jitter-eps: the noise of a token depends on the packing; leave it "
          "out"),
    Trait(_CHANCE, "random-routing", _on("moe_router_force_load_balancing"),
          reason="--moe-router-force-load-balancing: the experts of a token depend on the packing; "
          "leave it out"),
)  # fmt: skip
UNPROVEN = tuple(trait for trait in TRAITS if trait.row is None)
# Looked at when the model is there: what the script builds is not in the arguments.
MODEL_CLASS = "model-class"


def traits_of(args: argparse.Namespace) -> list[Trait]:
    """What parsed arguments have of `TRAITS`."""
    return [trait for trait in TRAITS if trait.present(args)]


def unproven(args: argparse.Namespace) -> list[str]:
    """The reasons why traits of these arguments are refused; admitted ones are warned of, once.

    Raises:
        OptionError: `--admit-unproven` names no trait.
    """
    admitted = set(args.admit_unproven or ())
    known = {MODEL_CLASS, *(trait.name for trait in UNPROVEN)}
    if wrong := sorted(admitted - known):
        raise OptionError(
            f"--admit-unproven {' '.join(wrong)}: no such trait; there are "
            f"{', '.join(sorted(known))}"
        )
    found = [trait for trait in traits_of(args) if trait.row is None]
    for trait in found:
        if trait.name in admitted:
            _warn_once(trait)
    return [
        f"{trait.reason}, or admit it with --admit-unproven {trait.name}"
        for trait in found
        if trait.name not in admitted
    ]


_warned: set[str] = set()


def _warn_once(trait: Trait) -> None:
    if trait.name in _warned or os.environ.get("RANK", "0") != "0":
        return
    _warned.add(trait.name)
    reason = trait.reason.rpartition("; ")[0]
    warnings.warn(f"admitted without a parity test: {reason}", stacklevel=3)


def check_model(args: argparse.Namespace, chunks: Sequence[Any]) -> None:
    """Refuse a model of a class that has no parity row.

    Raises:
        OptionError: A chunk is no GPTModel.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.utils import unwrap_model

    for chunk in chunks:
        model = unwrap_model(chunk)
        if not isinstance(model, GPTModel) and MODEL_CLASS not in (args.admit_unproven or ()):
            raise OptionError(
                f"the model is a {type(model).__name__}: parity tests have GPTModel only; build "
                f"one, or admit yours with --admit-unproven {MODEL_CLASS}"
            )


def table_of_traits() -> str:
    """Every trait as a Markdown table, for docs/compatibility.md."""
    lines = ["| | trait | megatron-core | row of [parity.md](parity.md) |", "|---|---|---|---|"]
    for trait in TRAITS:
        proof = "**refused** unless admitted"
        since = ""
        if trait.row is not None:
            proof, since = trait.row[1], f"{trait.since} and newer"
        lines.append(f"| {trait.kind} | `{trait.name}` | {since} | {proof} |")
    lines.append(f"| model | `{MODEL_CLASS}` | | GPTModel; another class is **refused** |")
    return "\n".join(lines) + "\n"


# Loss terms whose scale is class state: those that `aux_loss` weights, and who admits another.
_WEIGHTED = ("MoEAuxLossAutoScaler", "MTPLossAutoScaler")
_ADMITTED_BY = {"DSAIndexerLossAutoScaler": "dsa-indexer-loss"}


def scaled_terms() -> dict[str, Any]:
    """The loss terms whose scale Megatron's schedule sets on a class, by the class's name."""
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(schedules))):
        if not isinstance(node, ast.ImportFrom):
            continue
        for name in (alias.name for alias in node.names if alias.name.endswith("AutoScaler")):
            with contextlib.suppress(ImportError):  # then no model can use it
                found[name] = getattr(importlib.import_module(str(node.module)), name)
    return found


def guard_scaled_terms() -> None:
    """Let a loss term that no hook weights raise where a model of a training first uses it.

    The arguments do not tell what a model of the script's own has in it.
    """
    for name, term in scaled_terms().items():
        if name not in _WEIGHTED and not hasattr(term.apply, "guarded"):
            term.apply = _refusing(name, term.apply)


def _refusing(name: str, apply: Callable[..., Any]) -> Any:
    def apply_or_refuse(*inputs: Any) -> Any:
        from megatron_dynbatch.hooks.session import session

        run = session()
        if run is not None and run.step is not None:
            if _ADMITTED_BY.get(name) not in set(run.args.admit_unproven or ()):
                raise OptionError(
                    f"the model has a loss term that is not weighted by tokens ({name}): it would "
                    "depend on the packing; leave the term out of the model"
                )
        return apply(*inputs)

    apply_or_refuse.guarded = True  # type: ignore[attr-defined]
    return apply_or_refuse

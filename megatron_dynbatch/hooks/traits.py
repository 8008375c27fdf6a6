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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_dynbatch.errors import OptionError


@dataclass(frozen=True, slots=True)
class Trait:
    """A property of a model or a training.

    Attributes:
        name: As `--admit-unproven` takes it.
        present: Whether validated arguments have it.
        reason: Why it is refused and what to write instead: "FLAGS: why; what".
    """

    name: str
    present: Callable[[argparse.Namespace], bool]
    reason: str


def _on(*names: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: any(getattr(args, name, None) for name in names)


def _variant(name: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: getattr(args, "experimental_attention_variant", None) == name


UNPROVEN = (
    Trait("dropout", _on("attention_dropout", "hidden_dropout"),
          "--attention-dropout, --hidden-dropout: what is dropped depends on the packing, and "
          "Megatron's defaults are 0.1; write --attention-dropout 0 --hidden-dropout 0"),
    Trait("input-jitter", _on("moe_input_jitter_eps"),
          "--moe-input-jitter-eps: the noise of a token depends on the packing; leave it out"),
    Trait("random-routing", _on("moe_router_force_load_balancing"),
          "--moe-router-force-load-balancing: the experts of a token depend on the packing; leave "
          "it out"),
    Trait("dsa-indexer-loss",
          lambda args: _variant("dsa")(args) and bool(_on("dsa_indexer_loss_coeff")(args)),
          "--dsa-indexer-loss-coeff: the term weighs every micro-batch alike, so it depends on the "
          "packing; leave it out"),
    Trait("dsa", _variant("dsa"),
          "--experimental-attention-variant dsa: no parity test has it; leave it out"),
    Trait("qk-clip", _on("qk_clip"),
          "--qk-clip: the largest attention logit is taken over padding too; leave it out"),
)  # fmt: skip


def unproven(args: argparse.Namespace) -> list[str]:
    """The reasons why traits of these arguments are refused; admitted ones are warned of, once.

    Raises:
        OptionError: `--admit-unproven` names no trait.
    """
    admitted = set(args.admit_unproven or ())
    known = {trait.name for trait in UNPROVEN}
    if wrong := sorted(admitted - known):
        raise OptionError(
            f"--admit-unproven {' '.join(wrong)}: no such trait; there are "
            f"{', '.join(sorted(known))}"
        )
    present = [trait for trait in UNPROVEN if trait.present(args)]
    for trait in present:
        if trait.name in admitted:
            _warn_once(trait)
    return [
        f"{trait.reason}, or admit it with --admit-unproven {trait.name}"
        for trait in present
        if trait.name not in admitted
    ]


_warned: set[str] = set()


def _warn_once(trait: Trait) -> None:
    if trait.name in _warned or os.environ.get("RANK", "0") != "0":
        return
    _warned.add(trait.name)
    reason = trait.reason.rpartition("; ")[0]
    warnings.warn(f"admitted without a parity test: {reason}", stacklevel=3)


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

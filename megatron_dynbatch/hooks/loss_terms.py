"""Loss terms whose scale is state of a class: one that no hook weights is refused where it is used.

The arguments do not tell what a model of the script's own has in it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks.session import session

# Those that `aux_loss` weights, and the trait that admits another.
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
    """Let a loss term that no hook weights raise where a model of a training first uses it."""
    for name, term in scaled_terms().items():
        if name not in _WEIGHTED and not hasattr(term.apply, "guarded"):
            term.apply = _refusing(name, term.apply)


def _refusing(name: str, apply: Callable[..., Any]) -> Any:
    def apply_or_refuse(*inputs: Any) -> Any:
        run = session()
        if run is not None and run.step is not None:
            if _ADMITTED_BY.get(name) not in run.options.admitted:
                raise OptionError(
                    f"the model has a loss term that is not weighted by tokens ({name}): it would "
                    "depend on the packing; leave the term out of the model"
                )
        return apply(*inputs)

    apply_or_refuse.guarded = True  # type: ignore[attr-defined]
    return apply_or_refuse

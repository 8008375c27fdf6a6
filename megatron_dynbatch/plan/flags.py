"""Names of options as people typed them: `max_tokens_per_gpu=3` is `--max-tokens-per-gpu 3`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields

from megatron_dynbatch.errors import OptionError, PlanError
from megatron_dynbatch.geometry import ParallelLayout
from megatron_dynbatch.plan.options import PlanOptions

_PLAN = {f.name: f"--{f.name.replace('_', '-')}" for f in fields(PlanOptions) if f.name != "cost"}
_LAYOUT = {f.name: f"--{f.name.replace('_', '-')}" for f in fields(ParallelLayout)}
_COST = {name: f"--cost-{name.replace('_', '-')}" for name in ("alpha", "beta", "gamma")}

COMMAND_FLAGS = {**_PLAN, **_LAYOUT, **_COST}
"""Option → flag of `megatron-dynbatch plan`."""

TRAINING_FLAGS = {
    **_PLAN,
    "fixed_width": "--micro-batch-width fixed",
    "order": "--micro-batch-order",
    "cp": "--context-parallel-size",
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
    "vpp_group": "--microbatch-group-size-per-virtual-pipeline-stage",
    "ep": "--expert-model-parallel-size",
}
"""Option → flag of a training script."""

_PHRASES = {
    "step splitter '": "--step-splitter '",
    "cost function '": "--cost-function '",
    "leftover policies": "policies of --leftover",
}
_PREFIX = re.compile(r"^(plan options|layout|cost model): ")


def as_typed(message: str, flags: Mapping[str, str]) -> str:
    """A planner's message with flags in the place of the names that Python knows.

    Args:
        message: Of a `PlanError`.
        flags: Option → flag.
    """
    for phrase, typed in _PHRASES.items():
        message = message.replace(phrase, typed)
    text = _PREFIX.sub("", message)
    for name, flag in sorted(flags.items(), key=lambda item: -len(item[0])):
        text = re.sub(rf"(?<![\w-]){name}=", f"{flag} ", text)
        # A bare word is an option only where nothing else can be meant.
        follows = "" if "_" in name else r"(?= must be| > | '| needs )"
        text = re.sub(rf"(?<![\w-]){name}(?![\w=-]){follows}", flag, text)
    return text


@contextmanager
def options_as_typed(flags: Mapping[str, str]) -> Iterator[None]:
    """Turn a `PlanError` about options into an `OptionError` that names flags.

    Args:
        flags: Option → flag.

    Raises:
        OptionError: In the place of a `PlanError`.
    """
    try:
        yield
    except PlanError as error:
        raise OptionError(as_typed(str(error), flags)) from error

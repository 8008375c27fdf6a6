"""Which run it was: command, layout, model and versions, in a file beside the step reports."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_dynbatch._version import __version__

_PACKAGES = ("megatron-core", "torch", "transformer-engine", "numpy", "pyarrow")
MODEL_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "num_experts", "padded_vocab_size", "position_embedding_type", "params_dtype",
)  # fmt: skip


def identity_file(steps: Path) -> Path:
    """Where it lies: `steps.run.json` beside `steps.jsonl`."""
    return steps.with_suffix(".run.json")


def versions() -> dict[str, str]:
    """Package → version of what decides numbers; what is not installed is left out."""
    found = {"megatron_dynbatch": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_identity(steps: Path, args: Any, layout: Mapping[str, Any]) -> None:
    """Write what is known when the first step has run; a resumed run replaces it.

    Args:
        steps: The file of step reports.
        args: Megatron's arguments.
        layout: Sizes of the parallel groups.
    """
    model = {name: getattr(args, name, None) for name in MODEL_ARGUMENTS}
    values = {
        "command": shlex.join(sys.argv),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "layout": {name: value for name, value in layout.items() if value not in (None, False)},
        "model": {name: str(value) for name, value in model.items() if value is not None},
        "versions": versions(),
    }
    identity_file(steps).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_identity(steps: Path) -> dict[str, Any]:
    """What `write_identity` wrote; empty where there is no such file, or it is damaged."""
    try:
        found = json.loads(identity_file(steps).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

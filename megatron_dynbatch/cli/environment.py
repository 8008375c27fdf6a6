"""What is installed here, and whether the plugin works with it."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from megatron_dynbatch._version import __version__
from megatron_dynbatch.versions import TESTED


@dataclass(frozen=True)
class Check:
    """One line of a doctor's report.

    Attributes:
        name: What was looked at.
        found: What was found.
        problem: What to do about it; None if all is well.
    """

    name: str
    found: str
    problem: str | None = None


def environment() -> list[Check]:
    """Versions of everything that matters here; imports torch and Megatron, if they are there."""
    has_torch = find_spec("torch") is not None
    return [
        Check("megatron_dynbatch", f"{__version__} ({Path(__file__).parents[1]})"),
        Check("python", sys.version.split()[0]),
        _optional("numpy", "numpy", "not installed"),
        _optional("pyarrow", "pyarrow", "not installed"),
        *(_megatron() if has_torch else [_megatron_unseen()]),
        *(_torch() if has_torch else [_no_torch()]),
        _optional("transformer-engine", "transformer_engine",
                  "not installed; Megatron runs with --transformer-impl local"),
        _optional("apex", "apex", "not installed; Megatron uses torch's fused optimizers"),
        _optional("ray", "ray", "not installed; rollouts come from a directory"),
        _optional("matplotlib", "matplotlib",
                  "not installed; pictures need it: pip install 'megatron-dynbatch[plot]'"),
        *([_kernels()] if has_torch else []),
    ]


def _no_torch() -> Check:
    return Check(
        "torch", "not installed",
        "torch is missing: rollouts and plans work without it, training needs it: "
        "pip install 'megatron-dynbatch[torch]', or the build for your GPUs from pytorch.org",
    )


def _megatron_unseen() -> Check:
    try:
        return Check("megatron-core", f"{version('megatron-core')}, cannot be looked into")
    except PackageNotFoundError:
        return Check("megatron-core", "not installed", _NO_MEGATRON)


_NO_MEGATRON = (
    "megatron-core is missing: pip install 'megatron-dynbatch[megatron]', or put a Megatron-LM "
    "checkout on PYTHONPATH"
)


def _megatron() -> list[Check]:
    if _missing("megatron.core"):
        return [Check("megatron-core", "not installed", _NO_MEGATRON)]
    from megatron.core import package_info

    core = _root("megatron.core")
    number = package_info.__version__.partition("+")[0]
    tested = number in TESTED
    checks = [Check("megatron-core", f"{number} ({core}), {'' if tested else 'not '}tested")]
    if _missing("megatron.training"):
        checks.append(Check(
            "megatron.training", "not there",
            "this megatron-core has no training loop to hook into: use 0.17 or newer, put a "
            "checkout on PYTHONPATH, or use the plain functions in a loop of your own",
        ))
        return checks
    training = _root("megatron.training")
    problem = None
    if training != core:
        problem = (
            f"megatron.core comes from {core} and megatron.training from {training}: two versions "
            "are mixed; put one checkout first on PYTHONPATH or uninstall the other"
        )
    checks.append(Check("megatron.training", str(training), problem))
    return checks


def _missing(name: str) -> bool:
    parent = name.partition(".")[0]
    return find_spec(parent) is None or find_spec(name) is None


def _root(name: str) -> Path:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    return Path(module.__file__).resolve().parents[2]


def _torch() -> list[Check]:
    import torch

    checks = [Check("torch", torch.__version__)]
    if torch.version.cuda is None:
        checks.append(Check("CUDA", "this torch was built without it"))
    elif _has_gpu():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        count = torch.cuda.device_count()
        checks.append(Check("CUDA", f"{torch.version.cuda}, {count} × {', '.join(sorted(names))}"))
    else:
        checks.append(Check("CUDA", f"{torch.version.cuda}, no GPU here"))
    return checks


def _has_gpu() -> bool:
    import torch

    # Under the CPU runner torch.cuda says yes to everything but where a tensor lies.
    return torch.cuda.is_available() and torch.empty(0, device="cuda").device.type == "cuda"


def _optional(distribution: str, module: str, without: str) -> Check:
    """A package that may be absent; it is not imported, which can take long."""
    try:
        return Check(distribution, version(distribution))
    except PackageNotFoundError:
        return Check(distribution, without if find_spec(module) is None else "installed")


def _kernels() -> Check:
    import torch

    from megatron_dynbatch.reduce import kernels

    device = torch.device("cuda", torch.cuda.current_device()) if _has_gpu() else "cpu"
    return Check("reduction kernels", kernels.status(torch.device(device)).reason)

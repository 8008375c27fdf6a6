"""What may be imported when: hooks before Megatron, plain functions without megatron.training."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.reliability.catalogue import shown

WITHOUT_TRAINING = """
import sys
sys.modules["megatron.training"] = None
import megatron_dynbatch
from megatron_dynbatch import layout, losses, plan, reduce, report, rollouts, steps
try:
    megatron_dynbatch.install()
except ModuleNotFoundError as error:
    print(error)
"""


WITHOUT_TORCH = """
import importlib, pkgutil, sys
sys.modules["torch"] = sys.modules["megatron"] = None
import megatron_dynbatch
from megatron_dynbatch.errors import MissingPackage
import megatron_dynbatch.plan, megatron_dynbatch.rollouts
import megatron_dynbatch.report, megatron_dynbatch.run
told = []
for name in megatron_dynbatch.__all__ + ["report.rollout_report"]:
    home, _, attribute = ("megatron_dynbatch." + name).rpartition(".")
    try:
        getattr(importlib.import_module(home), attribute)
    except MissingPackage as error:
        assert "pip install 'megatron-dynbatch[torch]'" in str(error)
        told.append(name)
for module in pkgutil.iter_modules(megatron_dynbatch.__path__, "megatron_dynbatch."):
    if module.ispkg:
        try:
            importlib.import_module(module.name)
        except MissingPackage:
            told.append(module.name.rpartition(".")[2])
print(" ".join(told))
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_hooks_import_nothing_of_megatron() -> None:
    # A patched module of Megatron imports them while it is being loaded.
    out = run(
        "import sys, megatron_dynbatch.patched, megatron_dynbatch.hooks.registry\n"
        "print([name for name in sys.modules if name.partition('.')[0] == 'megatron'])"
    )
    assert out.strip() == "[]"


def test_plain_functions_need_no_megatron_training() -> None:
    out = run(WITHOUT_TRAINING)
    assert "install() hooks into megatron.training" in out
    assert "loop of your own needs no install()" in out
    shown("megatron_dynbatch.install() hooks", out)


def test_what_needs_torch_says_how_to_get_it() -> None:
    assert run(WITHOUT_TORCH).split() == [
        "MicroBatch", "current", "get_batch", "install", "on_batch_needed", "on_batch_opened",
        "uninstall", "report.rollout_report",
        "cpu", "hooks", "layout", "logprob", "losses", "reduce", "steps",
    ]  # fmt: skip


def test_zigzag_is_transformer_engines_partition() -> None:
    torch = pytest.importorskip("torch")
    extension = pytest.importorskip("transformer_engine_torch")
    if not torch.cuda.is_available():
        pytest.skip("Transformer Engine's partition needs a GPU")
    from megatron_dynbatch.geometry import zigzag_indices

    for cp in (2, 4, 8):
        cu_seqlens = [0, 2 * cp, 8 * cp, 12 * cp, 32 * cp]
        on_gpu = torch.tensor(cu_seqlens, dtype=torch.int32, device="cuda")
        for rank in range(cp):
            theirs = extension.thd_get_partitioned_indices(on_gpu, cu_seqlens[-1], cp, rank)
            assert theirs.tolist() == zigzag_indices(cu_seqlens, cp, rank).tolist()

"""What the CPU runner changes is what docs/cpu.md lists; its GELU is Megatron's."""

from __future__ import annotations

import argparse
import math
import re
import sys
from typing import Any

import torch
from torch import Tensor

from tests.pool import ROOT, run_ranks

MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 64 "
    "--tokenizer-type NullTokenizer --vocab-size 31 --lr 1e-2 --seq-length 8 --micro-batch-size 1 "
    "--train-iters 1 --transformer-impl local"
).split()


def changed_options() -> set[str]:
    """Flags of Megatron's parser whose default the CPU runner changes or sets."""
    from megatron.training import arguments

    from megatron_dynbatch.cpu.megatron_patches import CPU_DEFAULTS

    wrapped: Any = arguments.add_megatron_arguments
    found = {"cpu": wrapped}
    while hasattr(found["cpu"], "__wrapped__"):
        found["cpu"] = found["cpu"].__wrapped__
    stock = found["cpu"](argparse.ArgumentParser(allow_abbrev=False))
    ours = wrapped(argparse.ArgumentParser(allow_abbrev=False))
    differing = {
        action.dest
        for action in stock._actions
        if ours.get_default(action.dest) != stock.get_default(action.dest)
    }
    assert differing <= set(CPU_DEFAULTS), differing - set(CPU_DEFAULTS)
    flags = {a.dest: a.option_strings[0] for a in stock._actions if a.option_strings}
    return {flags[name] for name in CPU_DEFAULTS}


def test_the_page_lists_every_default_that_is_changed() -> None:
    text = (ROOT / "docs" / "cpu.md").read_text(encoding="utf-8")
    table = text.partition("## Defaults that are changed")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(--[\w-]+)`", table, re.MULTILINE)
    (changed,) = run_ranks(1, changed_options, process_group=False)
    assert set(listed) == changed and len(listed) == len(changed)


def mlp(fused: bool) -> tuple[bool, dict[str, Tensor]]:
    """Megatron's MLP with the runner's defaults on one input: output, gradients, parameters."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.mlp import MLP
    from megatron.training.arguments import (
        core_transformer_config_from_args,
        parse_and_validate_args,
    )

    sys.argv = ["script.py", *MODEL, *["--no-bias-gelu-fusion"] * (not fused)]
    config = core_transformer_config_from_args(parse_and_validate_args())
    config.params_dtype = torch.float64
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    module = MLP(config, _linears()).double()
    random = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
    x = torch.randn(5, 1, 16, generator=random, dtype=torch.float64, requires_grad=True)
    output, bias = module(x)
    (output + bias).square().sum().backward()
    found = {"x": x.detach(), "output": (output + bias).detach(), "gradient of x": x.grad}
    for name, parameter in module.named_parameters():
        found |= {name: parameter.detach(), f"gradient of {name}": parameter.grad}
    return config.bias_activation_fusion, found


def _linears() -> Any:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    return MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def tanh_gelu(x: Tensor) -> Tensor:
    """Hendrycks and Gimpel, arXiv:1606.08415, section 2."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def exact_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def deviation(found: dict[str, Tensor], gelu: Any) -> float:
    """Of output and every gradient from the formula with this activation."""
    own = {n: v.clone().requires_grad_() for n, v in found.items() if not n.startswith("gradient")}
    hidden = own["x"] @ own["linear_fc1.weight"].T + own["linear_fc1.bias"]
    output = gelu(hidden) @ own["linear_fc2.weight"].T + own["linear_fc2.bias"]
    output.square().sum().backward()
    wanted = {f"gradient of {n}": v.grad for n, v in own.items() if n != "output"}
    wanted["output"] = output.detach()
    assert len(wanted) == 6
    return max(float((found[n] - v).norm() / v.norm()) for n, v in wanted.items() if v is not None)


def test_the_activation_is_megatrons_default_the_tanh_form() -> None:
    ((is_fused, found),) = run_ranks(1, mlp, True)
    assert is_fused
    # Megatron writes its constants with eight digits.
    assert deviation(found, tanh_gelu) < 1e-7
    assert deviation(found, exact_gelu) > 1e-5


def test_without_the_fusion_it_is_the_exact_form() -> None:
    ((is_fused, found),) = run_ranks(1, mlp, False)
    assert not is_fused
    assert deviation(found, exact_gelu) < 1e-12

"""Auxiliary losses do not know how the step was packed, padded or laid out.

The yardstick is Megatron itself: the whole step as one micro-batch on one rank, where no weight of
ours can enter (the factor is Megatron's own C/M = 1), without a token of padding. Every packing,
width and layout must give the same gradient norm, loss, logged auxiliary loss and, for the expert
bias, the same counts. Float32: 2e-6 relative; the loads of experts are integers.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from tests.cpu.training import train_ranks
from tests.deviation import largest
from tests.deviation import relative as deviation
from tests.parity.test_layouts import Record

pytestmark = pytest.mark.slow

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
KINDS = {
    "z_loss": f"{EXPERTS} --moe-router-load-balancing-type none --moe-z-loss-coeff 1.0",
    "expert bias": (
        f"{EXPERTS} --moe-router-load-balancing-type none --moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
    ),
    "load_balancing_loss": (
        f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1.0"
    ),
    "mtp_1 loss": "--mtp-num-layers 1 --mtp-loss-scaling-factor 1.0",
}
ROLLOUTS = 4
TOTAL = 96  # tokens of each step


def write_steps(path: Path) -> None:
    """Three steps of four rollouts, 7 samples and 96 tokens each."""
    random = np.random.default_rng(5)
    rollouts = RolloutDirectory(path)
    for _ in range(3):
        lengths = np.array([20, 18, 16, 14, 12, 10, 6])
        samples = []
        for length, rollout in zip(lengths, [0, 0, 1, 2, 2, 3, 3], strict=True):
            mask = (random.random(length - 3) < 0.8).astype(np.uint8)
            tokens = random.integers(1, 120, length)
            samples.append(Sample(tokens, loss_mask=mask, rollout_id=rollout))
        rollouts.write(samples)
    rollouts.finish()


def level_routing(model: list[Any], optimizer: Any) -> None:
    """Routers that send every token to the same experts: equal frequencies in any micro-batch."""
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if "router.weight" in name:
                parameter.data.zero_()
    optimizer.reload_model_params()


LINES: list[str] = []


def watch_log(model: list[Any], optimizer: Any) -> None:
    """Keep Megatron's own log lines."""
    from megatron.training import training

    printed = training.print_rank_last
    training.print_rank_last = lambda line: (LINES.append(line), printed(line))[1]


def watch_log_and_level(model: list[Any], optimizer: Any) -> None:
    watch_log(model, optimizer)
    level_routing(model, optimizer)


def log_and_loads(model: list[Any], optimizer: Any) -> tuple[list[str], list[list[float]]]:
    """The log lines, and the expert bias of each layer that has one."""
    biases = [
        buffer.tolist()
        for chunk in model
        for name, buffer in chunk.named_buffers()
        if name.endswith("expert_bias")
    ]
    return LINES, biases


@cache
def train_cell(
    path: Path, kind: str, ranks: int, cap: int, flags: str, cp: int
) -> tuple[list[tuple[float, float]], list[float], list[list[float]]]:
    """Loss and grad norm of each step, logged values of the kind's loss, biases of all layers."""
    level = kind == "load_balancing_loss"
    width = "" if "variable" in flags else f"--seq-length {cap * cp}"
    trainings = train_ranks(
        ranks,
        f"--dynamic-global-batch --rollout-path {path} --rollouts-per-step {ROLLOUTS} "
        f"--max-tokens-per-gpu {cap} {width} --max-position-embeddings 512 {KINDS[kind]} "
        f"--num-layers 4 --lr 1e-3 {flags} --train-iters {1 if level else 3}".split(),
        install_hooks=True,
        timeout=200,
        before=watch_log_and_level if level else watch_log,
        collect=log_and_loads,
    )
    last = trainings[-1]
    rows = [(row["lm loss"], row["grad_norm"]) for row in last.rows]
    number = re.compile(rf"{re.escape(kind)}: (\S+)")
    logged = [float(found[1]) for line in last.collected[0] if (found := number.search(line))]
    stages = int(flags.split("pipeline-model-parallel-size ")[1][0]) if "pipeline" in flags else 1
    firsts = trainings[:: max(ranks // stages, 1)][:stages]
    # Virtual stages interleave the layers.
    biases = sorted(bias for training in firsts for bias in training.collected[1])
    return rows, logged, biases


CELLS = {
    # name: ranks, cap per GPU, flags, cp
    "seven micro-batches": (1, 20, "", 1),
    "wide padding": (1, 128, "", 1),
    "wider padding": (1, 256, "", 1),
    "variable width": (1, 40, "--micro-batch-width variable --seq-length 64", 1),
    "DP2": (2, 32, "", 1),
    "DP4 with dummies": (4, 64, "", 1),
    "PP2": (2, 40, "--pipeline-model-parallel-size 2", 1),
    "PP2 with recompute": (
        2,
        40,
        "--pipeline-model-parallel-size 2 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        1,
    ),
    "PP2 and VPP2": (
        2,
        40,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        1,
    ),
    "CP2": (2, 24, "--context-parallel-size 2", 2),
    "TP2 with sequence parallel": (2, 40, "--tensor-model-parallel-size 2 --sequence-parallel", 1),
    "EP2": (2, 32, "--expert-model-parallel-size 2", 1),
    "per-token loss": (1, 40, "--calculate-per-token-loss", 1),
    "CP2 with per-token loss": (2, 24, "--context-parallel-size 2 --calculate-per-token-loss", 2),
}


# The others are run by `make parity`; layouts are what `test_experts` compares with the loop.
FAST = ("wide padding", "variable width", "DP4 with dummies")


def applies(kind: str, cell: str) -> bool:
    """MTP and per-token loss are refused together; EP needs experts."""
    if cell not in FAST and os.environ.get("PARITY") != "full":
        return False
    return not (kind.startswith("mtp") and ("per-token" in cell or cell == "EP2"))


def relative(ours: object, theirs: object) -> float:
    """Largest relative difference; 0 of nothing, infinite for another shape."""
    a, b = np.array(ours, dtype=np.float64), np.array(theirs, dtype=np.float64)
    if a.shape != b.shape:
        return float("inf")
    return largest(map(deviation, a.ravel().tolist(), b.ravel().tolist()))


@pytest.fixture(scope="session")
def aux_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("aux") / "rollouts"
    write_steps(path)
    return path


@pytest.mark.parametrize(
    "kind, cell", [(kind, cell) for kind in KINDS for cell in CELLS if applies(kind, cell)]
)
def test_packing_padding_and_layout_change_nothing(
    aux_path: Path, kind: str, cell: str, record: Record
) -> None:
    rows, logged, biases = train_cell(aux_path, kind, 1, TOTAL, "", 1)
    assert logged or kind == "expert bias"
    ranks, cap, flags, cp = CELLS[cell]
    other_rows, other_logged, other_biases = train_cell(aux_path, kind, ranks, cap, flags, cp)
    found = {
        "loss and norm": relative(other_rows, rows),
        "logged": relative(other_logged, logged),
        "bias": relative(other_biases, biases),
    }
    record("auxiliary", f"{kind}, {cell}", found)
    assert found["loss and norm"] < 2e-6
    assert found["logged"] < 5e-6  # seven printed digits
    assert found["bias"] < 1e-6

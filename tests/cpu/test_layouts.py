"""The real pretrain trains the same model under every layout that the CPU runner serves."""

from __future__ import annotations

import math

import pytest

from tests.cpu.training import Training, train_ranks

LOSS_BAR, NORM_BAR = 1e-6, 1e-5  # float32, and Adam amplifies
TENSOR = "--tensor-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"

DENSE = {
    "DP2": "",
    "DP2, distributed optimizer": "--use-distributed-optimizer --overlap-grad-reduce",
    "TP2": TENSOR,
    "TP2, sequence parallel": f"{TENSOR} --sequence-parallel",
    "PP2": PIPELINE,
    "PP2, VPP2": f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1",
    "CP2": "--context-parallel-size 2",
    "PP2, recompute": f"{PIPELINE} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
}


def run(size: int, flags: str) -> Training:
    return train_ranks(size, ["--num-layers", "4", *flags.split()])[-1]


def assert_equal(got: Training, want: Training) -> None:
    assert len(got.rows) == len(want.rows) == 3
    for mine, theirs in zip(got.rows, want.rows, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            bar = NORM_BAR if name == "grad_norm" else LOSS_BAR
            assert math.isclose(mine[name], value, rel_tol=bar), (name, mine, theirs)


@pytest.fixture(scope="module")
def one_process() -> Training:
    return run(1, "")


def test_one_process_learns(one_process: Training) -> None:
    losses = one_process.column("lm loss")
    assert losses[-1] < losses[0] < 1.1 * math.log(128)
    assert one_process.column("consumed") == [4, 8, 12]


@pytest.mark.parametrize("layout", DENSE)
def test_dense_layouts_train_the_same(layout: str, one_process: Training) -> None:
    assert_equal(run(2, DENSE[layout]), one_process)


def test_expert_parallel_trains_the_same() -> None:
    assert_equal(run(2, f"{EXPERTS} --expert-model-parallel-size 2"), run(1, EXPERTS))

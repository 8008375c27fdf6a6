"""Races and overruns: the kernels are clean under sanitizers, and planted faults are found."""

import shutil
import subprocess

import pytest
import torch

from megatron_dynbatch.reduce import PolicyFormula, kernels, ops
from tests.reduce.emulator import emulator as emulation
from tests.reduce.test_kernels_on_host import ORDERS, assert_equal, random_batch, run_everything
from tests.reduce.test_policy_loss import TABLE, inputs
from tests.reduce.test_vocabulary_kernels import check, random_rows

pytestmark = pytest.mark.slow

SMALL = r"sums\w*_float32(_8)?,|token_weights|policy_loss"
BARRIER = ("common.cuh", "    __syncthreads();\n    Sum result;", "    Sum result;")
ARRIVAL = (
    "segments.cuh",
    "    __syncthreads();\n    if (threadIdx.x == 0) {\n        is_last",
    "    if (threadIdx.x == 0) {\n        is_last",
)
OVERRUN = ("common.cuh", "if (i < count) several", "if (i <= count) several")
PAST_THE_ROW = ("vocabulary.cuh", "(columns - head) / kVector;", "(columns - head) / kVector + 1;")


@pytest.fixture
def build(tmp_path, start):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")

    def make(sanitizer=None, only=SMALL, fault=None):
        try:
            return start(emulation.Emulator(tmp_path / "kernels", sanitizer, only, fault))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"the compiler has no {sanitizer} sanitizer: {error}")

    return make


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_clean_under_sanitizers(build, sanitizer):
    build(sanitizer)
    assert_equal(run_everything(*random_batch(3, 2, 1, 2, longest=300)))
    x, w = inputs(torch.float32)
    index = TABLE.on(torch.device("cpu"))
    arguments = (x["logp"], x["old"], x["advantages"], w, x["ref"], x["rollout"], x["entropy"])
    arguments += PolicyFormula(kl="k3", kl_coef=0.1, importance="mask").scalars()
    arguments += (index.pieces, index.samples, TABLE.num_samples)
    got, right = kernels.policy_loss(*arguments), ops._TORCH["policy_loss"](*arguments)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sanitizer", "fault", "report"),
    [
        ("thread", None, None),
        ("address", None, None),
        ("address", PAST_THE_ROW, "heap-buffer-overflow"),
    ],
)
def test_vocabulary_kernels(build, sanitizer, fault, report):
    build(sanitizer, "logprob_.*(float32|combine)", fault)
    logits, targets = random_rows(2, 137, torch.float32)
    if report is None:
        check(logits, targets, columns=134)
        return
    with pytest.raises(emulation.SanitizerError, match=report):
        check(logits, targets)


def test_a_missing_barrier_is_found_by_an_order_that_starves_a_warp(build):
    emulator = build(only="segment_sums_float32_8", fault=BARRIER)
    x, w = torch.ones(2, 200), torch.ones(200, dtype=torch.float64)
    sums = {}
    for name, order in ORDERS.items():
        emulator.order = order
        sums[name] = kernels.weighted_sums(x, w)
    assert torch.isnan(sums["second warp last"]).all()  # read before it was written: the poison


@pytest.mark.parametrize(
    ("sanitizer", "fault", "report"),
    [
        ("thread", BARRIER, "data race"),
        ("thread", ARRIVAL, "data race"),
        ("address", OVERRUN, "heap-buffer-overflow"),
    ],
)
def test_planted_faults_are_found(build, sanitizer, fault, report):
    build(sanitizer, "segment_sums_float32_8", fault)
    with pytest.raises(emulation.SanitizerError, match=report):
        for _ in range(5):  # a sanitizer sees a race in most runs, not in every one
            # Two blocks: the emulator runs two at a time, and waits before the next two. The last
            # thread has fewer than four tokens, which it reads one by one.
            kernels.weighted_sums(torch.ones(2, 499), torch.ones(499, dtype=torch.float64))

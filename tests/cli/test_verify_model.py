"""`verify --model` on the real Megatron: right scripts pass in every layout, faults are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynbatch.cli.model_result import ModelVerification, as_table
from megatron_dynbatch.cli.verify_rollouts import made_up_batches, write_batches
from megatron_dynbatch.rollouts import Sample
from tests.pool import ROOT, run_ranks

STOCK = ROOT / "examples" / "pretrain_gpt_sft.py"
OWN = Path(__file__).parent / "model_faults_script.py"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 16 --train-samples 12 --lr 1e-2 --lr-decay-style constant "
    "--log-interval 1 --eval-iters 0 --eval-interval 1000 --dynamic-global-batch "
    "--rollouts-per-step batch --max-tokens-per-gpu 48"
).split()
VARIABLE = ("--micro-batch-width", "variable")


def measure(
    cases: dict[str, tuple[Path, tuple[str, ...]]], rollouts: Path
) -> dict[str, tuple[ModelVerification, str]]:
    """`verify --model` of each script with its flags, in this rank's process."""
    import torch

    from megatron_dynbatch.cli.verify_model import measure as measure_model
    from megatron_dynbatch.cpu import reset_megatron
    from megatron_dynbatch.run import Launch, prepare

    torch.set_num_threads(1)
    sys.path[:0] = ["", str(ROOT)]  # the first is the script's folder
    prepare(cpu=True)
    found = {}
    for name, (script, flags) in cases.items():
        reset_megatron()
        argv = (*TINY, "--rollout-path", str(rollouts), *flags)
        result = measure_model(Launch(str(script), False, argv, cpu=True))
        found[name] = (result, as_table(result))
    return found


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    write_batches(tmp_path / "rollouts", made_up_batches(1, 5, seed=0))
    return tmp_path / "rollouts"


FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mean": ((), ("with what is packed together", "a mean per micro-batch")),
    "attention": ((), ("with what is packed together", "samples that see each other")),
    "positions": (
        ("--position-embedding-type", "learned_absolute"),
        ("with what is packed together", "positions that do not start anew"),
    ),
    "term per micro-batch": ((), ("dummies change it: a term is added",)),
    "dummies": ((), ("dummies change it: a term is added",)),
    "router": (
        ("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall",
         "--moe-router-load-balancing-type", "none", "--moe-z-loss-coeff", "0.5"),
        ("dummies change it: a term is added",),
    ),
}


def test_faults_are_found_and_right_scripts_pass(rollouts: Path) -> None:
    cases = {fault: (OWN, (*VARIABLE, "--fault", fault, *flags))
             for fault, (flags, _) in FAULTS.items()}  # fmt: skip
    admit = ("--admit-unproven", "dropout")
    cases["dropout"] = (OWN, (*VARIABLE, "--hidden-dropout", "0.1", *admit))
    cases["right"] = (OWN, VARIABLE)
    cases["stock"] = (STOCK, ("--loss-reduction", "token"))
    (found,) = run_ranks(1, measure, cases, rollouts, timeout=400)
    for name in ("right", "stock"):
        result, table = found[name]
        assert result.proves_it, table
        # Float32: far from the tolerance, and each sample alone was run by plain autograd.
        assert max(result.deviations["gradient"].values()) < 1e-5, table
    for fault, (_, words) in FAULTS.items():
        result, table = found[fault]
        assert not result.proves_it and result.is_reproducible, table
        assert result.wrong("gradient") and max(result.deviations["gradient"].values()) > 1e-3
        assert all(word in table for word in words), f"{fault}: {table}"
    # Only what is counted by the plan and not by each sample alone differs.
    assert found["dummies"][0].wrong("gradient") == ["more dummies"]
    result, table = found["dropout"]
    assert not result.is_reproducible and "two equal runs differ: dropout" in table


@pytest.mark.parametrize(
    "script, flags",
    [
        (STOCK, ("--use-distributed-optimizer", "--loss-reduction", "sample")),
        (OWN, (*VARIABLE, "--pipeline-model-parallel-size", "2")),
    ],
    ids=["DP2", "PP2"],
)
def test_two_ranks_agree_with_each_sample_alone(
    script: Path, flags: tuple[str, ...], rollouts: Path
) -> None:
    found = run_ranks(2, measure, {"right": (script, flags)}, rollouts, timeout=300)
    tables = [rank["right"][1] for rank in found]
    assert tables[0] == tables[1]  # collective: every rank knows the whole result
    result = found[0]["right"][0]
    assert result.proves_it and max(result.deviations["gradient"].values()) < 1e-5, tables[0]


LAYOUTS = {
    "TP2 SP": (OWN, (*VARIABLE, "--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "CP2": (OWN, (*VARIABLE, "--context-parallel-size", "2",
                     "--max-position-embeddings", "128")),
    "DP2 overlap": (STOCK, ("--use-distributed-optimizer", "--overlap-grad-reduce",
                            "--overlap-param-gather")),
    "per token": (STOCK, ("--calculate-per-token-loss",)),
    "z-loss": (OWN, (*VARIABLE, "--num-experts", "4", "--moe-router-topk", "2",
                     "--moe-token-dispatcher-type", "alltoall",
                     "--moe-z-loss-coeff", "0.5", "--moe-router-load-balancing-type", "none",
                     "--expert-model-parallel-size", "2")),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, rollouts: Path) -> None:
    found = run_ranks(2, measure, {name: LAYOUTS[name]}, rollouts, timeout=300)
    result, table = found[0][name]
    assert result.proves_it, table


@pytest.mark.slow
def test_half_precision_is_held_against_its_rounding(rollouts: Path) -> None:
    cases = {"right": (STOCK, ("--bf16",)), "mean": (OWN, (*VARIABLE, "--bf16", "--fault", "mean"))}
    (found,) = run_ranks(1, measure, cases, rollouts, timeout=300)
    result, table = found["right"]
    assert result.proves_it and result.tolerance == 4 / 128, table
    assert 1e-5 < max(result.deviations["gradient"].values()) < 4 / 128
    assert not found["mean"][0].proves_it


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


@pytest.mark.slow
def test_a_step_of_single_samples_shows_nothing(tmp_path: Path) -> None:
    """The command under torchrun; its exit code says that no packing was tested."""
    samples = [Sample([1] * 40, response_length=20), Sample([2] * 30, response_length=20)]
    write_batches(tmp_path / "rollouts", [samples])
    done = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "-m", "megatron_dynbatch.cli.main", "verify", "--model", "--cpu", str(STOCK),
               *TINY, "--rollout-path", str(tmp_path / "rollouts"))  # fmt: skip
    assert "\ninvariant as far as tested: nothing deviates by more than" in done.stdout
    assert "\nNOT tested: in the plan each sample is alone: raise --max-tokens" in done.stdout
    assert done.stdout.count("deviation from 'each alone'") == 1  # one rank prints
    assert done.returncode == 1

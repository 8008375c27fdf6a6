"""Scripts that want another batch, or hand too little of it to the model, are told in step one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynbatch.errors import BatchContractError
from megatron_dynbatch.rollouts import RolloutDirectory, Sample
from tests.cpu.training import SCRIPT, TINY, train
from tests.pool import ROOT, run_ranks
from tests.reliability.catalogue import shown

READ = "batch = {key: batch[key].cuda(non_blocking=True) for key in BATCH_KEYS}"
POSITIONS = '        batch["position_ids"],\n'
PACKING = "        packed_seq_params=packing,\n"
LENGTHS = 'cu_seqlens = batch["cu_seqlens"][0]\n'
BODY = "def model_provider(\n"
NO_PACKS = """
class OldModel(GPTModel):
    def forward(self, input_ids, position_ids, attention_mask, labels=None, loss_mask=None):
        return super().forward(input_ids, position_ids, attention_mask, labels=labels)


"""
STOCK_KEYS = "tokens, labels, loss_mask, position_ids, cu_seqlens"

# What is changed in the stock-shaped script → words of the error.
MISTAKES: dict[str, tuple[list[tuple[str, str]], list[str]]] = {
    "a key of T5": (
        [(READ, READ.replace("BATCH_KEYS", '(*BATCH_KEYS, "text_enc")'))],
        ["asks its batch for 'text_enc', which is not there", STOCK_KEYS, "GPT and hybrid decoder"],
    ),
    "a key of a copy": (
        [(POSITIONS, '        batch["image"],\n')],
        ["asks its batch for 'image', which is not there", STOCK_KEYS],
    ),
    "no packing": (
        [(PACKING, "")],
        ["calls GPTModel without packed_seq_params", "batch's cu_seqlens and max_seqlen"],
    ),
    "other sequences": (
        [(LENGTHS, 'cu_seqlens = batch["cu_seqlens"][0][[0, -1]]\n')],
        ["sequences end at 0, 64, but", "micro-batch end at 0, 5, 11, 16, 22, 64; pass the"],
    ),
    "no positions": (
        [(POSITIONS, "        None,\n")],
        ["calls GPTModel, which learns positions, without position_ids"],
    ),
    "a model without packs": (
        [(BODY, NO_PACKS + BODY), ("return GPTModel(", "return OldModel("), (PACKING, "")],
        ["OldModel takes no packed_seq_params", "those of GPT and hybrid decoder models"],
    ),
    "an attribute of a micro-batch": (
        [
            ("batch, packing = get_batch(data_iterator)",
             "import megatron_dynbatch; megatron_dynbatch.get_batch().images"),
        ],
        ["asks its micro-batch for 'images'", "tokens, labels, position_ids", "columns"],
    ),
    "a missing key that the script catches": (
        [
            (READ, f"""
        try:
            batch["attention_mask"]
        except KeyError:
            assert "attention_mask" not in batch
        {READ}""")
        ],
        ["3 steps"],
    ),
    "a KeyError of another dictionary": ([(LENGTHS, LENGTHS + '    {"a": 1}["b"]\n')],
                                         ["KeyError: 'b'"]),
}  # fmt: skip


def write_script(path: Path, changes: list[tuple[str, str]]) -> Path:
    text = SCRIPT.read_text()
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path.write_text(text)
    return path


def flags(path: Path) -> list[str]:
    """Twelve rollouts of 5 and 6 tokens, four in a step."""
    rollouts = RolloutDirectory(path / "rollouts")
    rollouts.write([Sample([1] * (5 + i % 2), response_length=2) for i in range(12)])
    rollouts.finish()
    return ["--dynamic-global-batch", "--rollout-path", str(path / "rollouts"),
            "--rollouts-per-step", "4", "--max-tokens-per-gpu", "64"]  # fmt: skip


def outcomes(scripts: dict[str, Path], argv: list[str]) -> dict[str, str]:
    """What a training of each script ends with."""
    found = {}
    for name, script in scripts.items():
        learned = ["--position-embedding-type", "learned_absolute"] * (name == "no positions")
        try:
            training = train([*argv, *learned], script, install_hooks=True)
            found[name] = f"{len(training.rows)} steps"
        except Exception as error:
            assert isinstance(error, BatchContractError) == (type(error) is not KeyError)
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_each_mistake_is_told_with_what_is_there(tmp_path: Path) -> None:
    scripts = {
        name: write_script(tmp_path / f"script{number}.py", changes)
        for number, (name, (changes, _)) in enumerate(MISTAKES.items())
    }
    (found,) = run_ranks(1, outcomes, scripts, flags(tmp_path))
    for name, (_, words) in MISTAKES.items():
        assert all(word in found[name] for word in words), f"{name}: {found[name]}"
    shown("the forward step asks its batch for", found["a key of T5"])
    shown("the forward step asks its micro-batch for", found["an attribute of a micro-batch"])
    shown("… takes no packed_seq_params", found["a model without packs"])
    shown("the forward step calls … without packed_seq_params", found["no packing"])
    shown("the forward step tells", found["other sequences"])
    shown("the forward step calls …, which learns", found["no positions"])


@pytest.mark.slow
def test_ranks_that_wait_for_the_one_that_failed_are_told(tmp_path: Path) -> None:
    """Only the first tensor-parallel rank reads the batch; the other waits in a broadcast."""
    script = write_script(tmp_path / "script.py", MISTAKES["a key of T5"][0])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "-m", "megatron_dynbatch.run", "--cpu", str(script), *TINY, *flags(tmp_path),
               "--tensor-model-parallel-size", "2"]  # fmt: skip
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180, cwd=ROOT
    )
    assert done.returncode == 1
    told = "the forward step asks its batch for 'text_enc', which is not there; a batch has tokens"
    assert f"BatchContractError: {told}" in done.stderr
    assert f"RankFailure: rank 0: BatchContractError: {told}" in done.stderr
